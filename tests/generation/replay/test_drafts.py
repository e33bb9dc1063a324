"""Speculative decoding by n-gram lookup: drafts change no sample and are used only if they save time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from stateful import Alternate
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_parallel
from hf_parallel import LogitsCache, SharedPrefixCache
from hf_parallel.cache.logits import Cursors
from hf_parallel.generation.decoding.replay import drafts
from hf_parallel.generation.decoding.replay.drafts import NgramDrafter
from hf_parallel.models.cpu.linear import LINEAR_VARIABLE

NEW = 40
SHARED, *TAILS = tiny.make_prompts([20, 4, 4, 9], seed=8)
INPUT_IDS, ATTENTION_MASK = tiny.left_pad([torch.cat((SHARED, tail)) for tail in TAILS])
WIDTH = INPUT_IDS.shape[1]


class Cycle(LogitsProcessor):
    """Makes a row repeat a cycle of tokens most of the time."""

    keeps_rows = False
    tokens = torch.tensor([10, 30, 50, 20, 60, 40, 70, 25, 35])

    def __init__(self, weight: float = 9.0) -> None:
        self.following = torch.arange(tiny.VOCAB_SIZE) % len(self.tokens)
        self.following[self.tokens] = (torch.arange(len(self.tokens)) + 1) % len(self.tokens)
        self.weight = weight

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        likely = self.tokens[self.following[input_ids[:, -1]]]
        return scores.scatter_add(1, likely[:, None], torch.full((len(scores), 1), self.weight))


@pytest.fixture(autouse=True)
def _plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")  # the same pass costs, and so the same drafts, on all machines


def sample(model: PreTrainedModel, rows: int = len(TAILS), mode: str = "resample", **settings: Any) -> Any:
    given: dict[str, Any] = {"attention_mask": ATTENTION_MASK[:rows], "max_new_tokens": NEW, "pad_token_id": 0}
    given |= {"logits_processor": LogitsProcessorList([Cycle()])}
    given |= {"do_sample": True, "temperature": 0.3, "return_dict_in_generate": True, "generation_mode": mode}
    return model.generate(INPUT_IDS[:rows], **(given | settings))  # type: ignore[operator]


@pytest.mark.parametrize(("rows", "kept"), [(1, False), (3, True)], ids=["one row", "rows with KV"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": False, "temperature": None},
        {"top_p": 0.8},
        {"repetition_penalty": 1.05},
        {"num_return_sequences": 2},
        {"eos_token_id": [3, 5, 9, 11]},
        {"replay": "hotspot"},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_drafts_change_no_token(model: PreTrainedModel, settings: dict[str, Any], rows: int, kept: bool) -> None:
    out, _ = check_drafts(model, rows, [SharedPrefixCache() if kept else None for _ in range(2)], settings)
    assert sum(one.stats.accepted_tokens for one in out) > 0 or "eos_token_id" in settings


def check_drafts(
    model: PreTrainedModel, rows: int, kv_caches: Sequence[SharedPrefixCache | None], settings: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Return what two calls generate with and without drafts, which have a cache each."""
    caches = [LogitsCache(), LogitsCache()]
    outputs: tuple[list[Any], list[Any]] = [], []
    for seed in range(2):
        with_drafts, without = (
            sample(model, rows, logits_cache=cache, past_key_values=kv_cache, seed=seed, draft_tokens=most, **settings)
            for cache, kv_cache, most in zip(caches, kv_caches, (None, 0), strict=True)
        )
        assert torch.equal(with_drafts.sequences, without.sequences)
        assert without.stats.drafted_tokens == without.stats.accepted_tokens == 0
        assert with_drafts.stats.forward_passes <= without.stats.forward_passes
        assert with_drafts.stats.decoded_tokens == without.stats.decoded_tokens
        outputs[0].append(with_drafts)
        outputs[1].append(without)
    return outputs


def check_continuation(model: PreTrainedModel, out: Sequence[Any], kv_cache: SharedPrefixCache) -> Any:
    """Continue the last of the completions, after drafts of which some were rejected; return the stats."""
    assert sum(one.stats.drafted_tokens for one in out) > sum(one.stats.accepted_tokens for one in out) > 0
    longer = torch.cat((out[-1].sequences[:1], INPUT_IDS[:1, :3]), dim=1)
    mask = torch.ones_like(longer)
    mask[:, :WIDTH] = ATTENTION_MASK[:1]
    settings: dict[str, Any] = {"generation_mode": "shared_prefix", "max_new_tokens": 12, "pad_token_id": 0}
    settings |= {"attention_mask": mask}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    again = model.generate(longer, past_key_values=kv_cache, **settings)  # type: ignore[operator]
    fresh = model.generate(longer, **settings)  # type: ignore[operator]
    assert torch.equal(again.sequences, fresh.sequences)
    for one, other in zip(again.logits, fresh.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    return again.stats


def test_a_rejected_draft_leaves_no_keys(model: PreTrainedModel) -> None:
    kv_caches = [SharedPrefixCache(), SharedPrefixCache()]
    out, _ = check_drafts(model, 3, kv_caches, {"max_new_tokens": 24, "temperature": 0.6})
    check_continuation(model, out, kv_caches[0])


def test_layers_with_states_draft_nothing() -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("lfm2")))
    assert sample(model, logits_cache=LogitsCache(), seed=0, draft_tokens=15).stats.drafted_tokens == 0


@pytest.mark.parametrize(
    ("settings", "drafted"),
    [
        ({}, True),
        ({"draft_tokens": 0}, False),
        ({"logits_processor": LogitsProcessorList([Alternate()])}, False),
        ({"seed": None}, False),
        ({"seed": None, "do_sample": False, "temperature": None}, True),
    ],
    ids=["seed", "draft_tokens=0", "stateful processor", "no seed", "greedy"],
)
def test_rows_draft_only_if_samples_do_not_depend_on_the_order_of_sampling(
    model: PreTrainedModel, settings: dict[str, Any], drafted: bool
) -> None:
    out = sample(model, logits_cache=LogitsCache(), **({"seed": 0} | settings))
    assert (out.stats.drafted_tokens > 0) == drafted


# Lookup


def fill(cache: LogitsCache, prompt: Sequence[int], *samples: Sequence[int]) -> Cursors:
    """Store the samples of rows 1, 2, ... after a prompt; the cursor of row 0 is at the end of the prompt."""
    cursors = Cursors(cache)
    cursors.start(0, "model", prompt)
    for row, tokens in enumerate(samples, start=1):
        cursors.start(row, "model", prompt)
        for token in tokens:
            cursors.advance(row, token)
    return cursors


def append(drafter: NgramDrafter, cursors: Cursors, tokens: Sequence[int]) -> None:
    for token in tokens:
        drafter.draft(0, cursors.node(0), 2, 100)
        drafter.add(cursors.node(0))
        cursors.advance(0, token)
        drafter.observe(0, cursors.node(0))


def test_a_draft_repeats_the_tokens_after_an_earlier_occurrence_of_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "INITIAL_RATES", dict.fromkeys(drafts.NGRAMS, 1.0))
    monkeypatch.setattr(drafts, "RATE_STEP", 0.0)
    cursors = fill(cache := LogitsCache(), [1, 2, 3, 4, 50, 51, 52], [9, 8, 7, 6, 5], [20, 21, 22, 23])
    drafter = NgramDrafter(cache)
    drafter.add_prompt(cursors.node(0))
    append(drafter, cursors, [9, 20, 21, 22])
    assert drafter.draft(0, cursors.node(0), 2, 100) == [23], "another sample"
    append(drafter, cursors, [1, 2, 3])
    assert drafter.draft(0, cursors.node(0), 2, 2) == [4, 50], "the prompt, up to the capacity"
    append(drafter, cursors, [30, 31, 32, 33, 30, 31, 32])
    assert drafter.draft(0, cursors.node(0), 2, 1) == [33], "the row itself"
    append(drafter, cursors, [77, 78])
    assert drafter.draft(0, cursors.node(0), 2, 100) == [], "no occurrence"
