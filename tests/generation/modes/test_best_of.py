"""Best of n: candidates equal shared_prefix, order by score, pruning, scorers, outputs, streams."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import TOKENIZER, Listener

import hf_parallel
from hf_parallel import SharedPrefixCache

EVERY_SETTING: dict[str, Any] = {
    "seed": [1, 2, 3],
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "num_candidates": 3,
    "prune_every": 4,
    "keep": 0.25,
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {"num_candidates": 3, "do_sample": True, "temperature": 0.9, "seed": 7, "prune_every": 4}
"""Arguments of a short call with a tiny model."""

NEW, N = 12, 4
PROMPTS = tiny.make_prompts([23, 11])
BATCH, MASK = tiny.left_pad(PROMPTS)
MODEL = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
COMMON: dict[str, Any] = {
    "attention_mask": MASK,
    "do_sample": True,
    "temperature": 0.5,
    "max_new_tokens": NEW,
    "eos_token_id": ord("e"),
    "pad_token_id": tiny.PAD,
    "return_dict_in_generate": True,
}


def best_of(**arguments: Any) -> Any:
    """Return the best of four candidates with the seed 3, of each of two prompts."""
    fixed = {"generation_mode": "best_of", "num_candidates": N, "seed": 3, "tokenizer": TOKENIZER}
    return MODEL.generate(BATCH, **COMMON | fixed | arguments)


def drawn(seed: Any = 3) -> tuple[list[list[int]], list[float]]:
    """Return the new tokens of `shared_prefix`, and their mean log-probabilities by one forward pass per row."""
    out = MODEL.generate(BATCH, generation_mode="shared_prefix", num_return_sequences=N, seed=seed, **COMMON)
    rows, means = [], []
    for row, length in enumerate(out.record.lengths):
        new = out.sequences[row, BATCH.shape[1] : length]
        ids = torch.cat((PROMPTS[row // N], new))
        log_probs = tiny.build("llama")(ids[None]).logits[0].log_softmax(-1)
        means.append(log_probs[-len(new) - 1 : -1].gather(1, new[:, None]).mean().item())
        rows.append(new.tolist())
    return rows, means


def new_tokens(out: Any) -> list[list[int]]:
    return [row[out.record.begin : end].tolist() for row, end in zip(out.sequences, out.record.lengths, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3, N])
def test_without_pruning_rows_are_those_of_shared_prefix_by_mean_log_probability(count: int) -> None:
    rows, means = drawn()
    out = best_of(num_return_sequences=count)
    order = [sorted(range(N), key=lambda k, p=p: -means[p * N + k]) for p in range(2)]
    assert new_tokens(out) == [rows[p * N + k] for p in range(2) for k in order[p][:count]]
    assert out.order == [order[p] for p in range(2) for _ in range(count)]
    assert out.chosen == [k for p in range(2) for k in order[p][:count]]
    assert out.pruned == [[]] * 2 * count
    for p in range(2):
        assert out.ratings[p * count] == pytest.approx(means[p * N : p * N + N], abs=1e-5)
    assert out.stats.decoded_tokens == sum(map(len, rows))


@given(
    every=st.integers(1, NEW),
    keep=st.floats(0.05, 0.95),
    count=st.integers(1, 2),
    salt=st.integers(0, 9),
)
@settings(max_examples=8)
def test_survivors_of_pruning_are_unpruned_rows_and_pruned_rows_cost_nothing_afterwards(
    every: int, keep: float, count: int, salt: int
) -> None:
    """Also with a scorer, whose values are arbitrary; an independent simulation says who survives."""
    rows, _ = drawn()

    def rate(tokens: Sequence[int]) -> float:
        return random.Random(f"{salt}{list(tokens)}").random()

    cache = SharedPrefixCache()
    out = best_of(
        scorer=lambda candidate: rate(candidate.tokens),
        prune_every=every,
        keep=keep,
        num_return_sequences=count,
        past_key_values=cache,
    )
    lengths = [len(row) for row in rows]
    for prompt in range(2):
        own = range(prompt * N, prompt * N + N)
        racing, pruned = list(own), set()
        for step in range(every, NEW, every):
            if all(len(rows[row]) <= step for row in range(2 * N) if row // N == prompt and row not in pruned):
                continue
            size = max(count, math.ceil(keep * len(racing)))
            racing.sort(key=lambda row, step=step: (-rate(rows[row][:step]), row))
            dropped = {row for row in racing[size:] if len(rows[row]) > step}
            racing, pruned = racing[:size], pruned | dropped
            lengths = [step if row in dropped else length for row, length in enumerate(lengths)]
        order = sorted(own, key=lambda row: (row in pruned, -rate(rows[row][: lengths[row]]), row))
        assert [row % N for row in order] == out.order[prompt * count]
        assert sorted(row % N for row in pruned) == out.pruned[prompt * count]
        assert new_tokens(out)[prompt * count : prompt * count + count] == [rows[row] for row in order[:count]]
        assert not pruned.intersection(order[:count])
    assert out.stats.decoded_tokens == sum(lengths)
    assert cache.pool.blocks == {node.block for node in cache.tree.nodes()}


PRUNING: dict[str, Any] = {"prune_every": 3, "keep": 0.5, "num_return_sequences": 2}


def test_streams_transcripts_and_scores_follow_the_order_of_the_output(tmp_path: Path) -> None:
    listener = Listener()
    out = best_of(streamer=listener, output_scores=True, **PRUNING)
    assert any(out.pruned)
    assert listener.tokens[1:] == out.sequences[:, BATCH.shape[1] :].T.tolist()
    assert all(events[-1] == ("", "end") for events in listener.rows.values())
    streamed = {row: "".join(text for text, _ in events) for row, events in listener.rows.items()}
    for prompt, section in enumerate(out.to_dict(TOKENIZER)["sections"]):
        first = 2 * prompt
        returned = out.chosen[first : first + 2]
        others = [k for k in range(N) if k not in returned]
        assert section["columns"] == [f"Candidate {k + 1}" for k in [*returned, *others]]
        cards = sorted(section["cards"], key=lambda card: card["column"])
        texts = ["".join(piece[1] for piece in card["pieces"]) for card in cards]
        assert texts == [out.texts[first][k].rstrip("e") for k in [*returned, *others]]
        assert [card["end_reason"] for card in cards] == [
            "pruned" * (k in out.pruned[first]) for k in [*returned, *others]
        ]
        assert texts == [streamed[first * N + k] for k in [*returned, *others]]
        assert section["notes"][0][1].startswith(f"candidate {returned[0] + 1}: ")
    assert out.to_html(TOKENIZER).count("pruned") >= len(out.pruned[0])
    for row, (tokens, log_probs) in enumerate(zip(new_tokens(out), out.log_probs, strict=True)):
        kept = log_probs[: len(tokens)]
        assert kept.mean().item() == pytest.approx(out.ratings[row][out.chosen[row]], abs=1e-5)
        for step, token in enumerate(tokens):
            assert out.scores[step][row, token].isfinite()
    assert len(out.scores) == out.sequences.shape[1] - BATCH.shape[1]


def shortest(candidate: Any) -> float:
    return -len(candidate.text)


def test_a_scorer_receives_candidates_and_may_be_named() -> None:
    seen = []

    def record(candidate: Any) -> float:
        seen.append(candidate)
        return shortest(candidate)

    expected, named = best_of(scorer=record), best_of(scorer="test_best_of:shortest")
    assert torch.equal(named.sequences, expected.sequences)
    prompts = [TOKENIZER.decode(prompt.tolist()) for prompt in PROMPTS]
    assert [candidate.prompt for candidate in seen] == [prompts[k // N] for k in range(2 * N)]
    assert [candidate.tokens for candidate in seen] == drawn()[0]
    assert [candidate.text for candidate in seen] == [text for texts in expected.texts[:2] for text in texts]
    assert [candidate.mean_log_prob for candidate in seen] == pytest.approx(drawn()[1], abs=1e-5)
    assert all(candidate.is_complete for candidate in seen)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_return_sequences": 5}, ValueError, "num_return_sequences must be .*got 5"),
        ({"do_sample": False}, ValueError, "give do_sample=True"),
        ({"keep": 1.0}, ValueError, "keep must be .*got 1.0"),
        ({"scorer": "math:nothing"}, ValueError, "scorer='math:nothing'"),
        ({"scorer": lambda candidate: math.nan}, ValueError, "scorer must .*got nan"),
        ({"scorer": lambda candidate: "good"}, TypeError, "scorer must .*got 'good'"),
    ],
)
def test_invalid_settings_and_scores_raise(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        best_of(**arguments)
