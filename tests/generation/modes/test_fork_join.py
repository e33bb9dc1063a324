"""fork_join: answers in the formats of trained models, whose forks the scripted model opens by itself."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hybrids  # noqa: F401 # adds models whose layers keep states
import pytest
import tiny
import torch
from test_dialect_texts import PROMPTS, run
from workers import TOKENIZER, encode, small_model

import hf_parallel
from hf_parallel import Fork, ForkJoinOutput
from hf_parallel.generation.call_dialects import CallDialect
from hf_parallel.generation.dialects import DIALECTS, Dialect, SkeletonDialect
from hf_parallel.generation.enabled import enabled
from hf_parallel.training import ParallelExample, teacher_forced_logits
from hf_parallel.training.dialects import parse

EVERY_SETTING: dict[str, Any] = {
    "seed": 7,
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "replay": "hotspot",
    "prefetch": True,
    "dialect": {"region": ["<A>", "</A>"], "branch": ["<B>", "</B>"], "positions": "reencode"},
    "opening": "So",
    "after": "</t>",
    "thinking_max_new_tokens": 5,
    "force": True,
    "paths": 3,
    "path_max_new_tokens": 12,
    "max_paths": 9,
    "max_depth": 2,
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {
    "dialect": {"region": ["<A>", "</A>"], "branch": ["<B>", "</B>"], "positions": "reencode"},
    "opening": "So <A>",
    "path_max_new_tokens": 4,
    "max_new_tokens": 60,
}
"""Arguments of a short call with a tiny model."""
OVERLAP = Dialect(("<P>", "</P>"), ("<B>", "</B>"), "overlap")
UNTRAINED = {"llama4_text", "ministral3"}
"""Models without training on packed rows, which is the oracle."""
ALL = {**DIALECTS, "overlap": OVERLAP}


def random_text(rng: random.Random, dialect: Dialect, depth: int = 0, prefix: str = "") -> str:
    """Return a random answer, or the contents of a path, with forks in it."""
    word = lambda: "".join(rng.choices("abcdefgh ,", k=rng.randint(1, 9)))  # noqa: E731
    text = word()
    if dialect.positions == "separate":
        for _ in range(rng.randint(0, 3 - depth)):
            path = random_text(rng, dialect, depth + 1)
            text += f"{dialect.region[0]}{dialect.branch[0]}{path}{dialect.branch[1]}{word()}"
        return text
    for _ in range(rng.choice([0, 1, 2][: 3 - depth]) if depth < (2 if dialect.is_nested else 1) else 0):
        numbers = [f"{prefix}{i + 1}" for i in range(rng.randint(1, 3) if dialect.outline else 2)]
        outlines = [f"{dialect.outline} {number}: {word()}\n" for number in numbers if dialect.outline]
        text += "".join([dialect.region[0], *outlines, dialect.fork])
        path = ""
        for number in numbers:
            if dialect.outline or not path:  # without an outline, paths have the same beginning
                path = random_text(rng, dialect, depth + 1, f"{number}.")
            gap, opening = dialect.first_text(number)
            text += f"{gap if number == numbers[0] else ''}{opening}{path}{dialect.branch[1]}{dialect.gap}"
        text += dialect.joined_text + word() + ("" if dialect.region[1] in dialect.joined_text else dialect.region[1])
        text += word()
    return text


def check_logits(model: Any, out: ForkJoinOutput) -> None:
    """The logits of all sampled tokens equal those of the training mask over the finished text."""
    example = ParallelExample.from_output(out)
    with torch.no_grad():
        log_probs = torch.log_softmax(teacher_forced_logits(model, example).float(), -1)
    queries, ids = torch.from_numpy(example.target_queries), torch.from_numpy(example.target_ids)
    _, sampled = out.record.sampled_log_probs()
    torch.testing.assert_close(log_probs[queries, ids], torch.from_numpy(sampled), atol=1e-4, rtol=1e-4)


def placed(example: ParallelExample) -> Counter[tuple[int, int]]:
    """Return all tokens with their positions."""
    return Counter(zip(example.position_ids.tolist(), example.input_ids.tolist(), strict=True))


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("seed", range(2))
def test_a_model_that_writes_a_text_gives_this_text_and_its_forks(name: str, seed: int) -> None:
    dialect, model = ALL[name], hf_parallel.enable(small_model())
    rng = random.Random(seed)
    texts = [random_text(rng, dialect) for _ in PROMPTS]
    out = run(dialect, [parse(text, dialect) for text in texts], max_new_tokens=3000)
    assert [text.removesuffix("<eos>") for text in out.transcripts] == texts
    check_logits(model, out)
    examples = [
        ParallelExample.from_text(text, TOKENIZER, dialect, prompt=encode(prompt))
        for text, prompt in zip(texts, PROMPTS, strict=True)
    ]
    ran, trained = placed(ParallelExample.from_output(out)), placed(ParallelExample.pack(examples))
    twice = ran - trained  # the token before a fork, where the text before it goes on beside the path
    assert not twice or dialect.positions == "separate" and {token for _, token in twice} == {ord("]")}
    uncomputed = trained - ran  # the last token of a path that is computed again as plain text
    assert all(token == ord(">") for _, token in uncomputed)
    assert not uncomputed or dialect.positions in ("reencode", "separate")


def check_forks(tokens: list[int], forks: Sequence[Fork], are_calls: bool = False) -> None:
    """The paths of forks are their slices of the tokens, unless these are what the paths have returned."""
    end = 0
    for fork in forks:
        if are_calls:
            assert 0 <= fork.start <= fork.end <= len(tokens)
            for path in fork.paths:
                assert path.ended_by
                assert path.returned is None or path.returned in path.text
                check_forks(path.tokens, path.forks, are_calls)
            continue
        assert end <= fork.start < fork.end <= len(tokens)
        assert tokens[fork.start : fork.end] == [token for path in fork.paths for token in path.tokens]
        end = fork.end
        for path in fork.paths:
            check_forks(path.tokens, path.forks)


def random_call(rng: random.Random) -> dict[str, Any]:
    """Return a call in whose dialect single letters are tags, so that a random model forks now and then."""
    a, b, c, d = rng.sample("etaoinshrb", 4)
    positions = rng.choice(["depth", "overlap", "reencode", "separate"])
    dialect = Dialect(
        (a, "" if positions == "separate" else b),
        (c, d),
        positions,
        gap=rng.choice(["", "\n"]),
        joined="" if positions == "separate" else rng.choice(["", "}}", "}"]),
        opening=rng.choice(["", c + "{number}:", "\n" + c]),
        is_nested=rng.random() < 0.8,
    )
    settings = {
        "dialect": dialect,
        "opening": rng.choice(["", "So", f"Q {a}"]),
        "paths": rng.randint(1, 4),
        "max_depth": rng.randint(1, 3),
        "max_paths": rng.randint(3, 12),
        "path_max_new_tokens": rng.choice([None, 3, 10]),
        "max_new_tokens": rng.choice([8, 20, 60, 120]),
        "num_return_sequences": rng.choice([1, 1, 2]),
        "seed": rng.randint(0, 99),
        "do_sample": True,
        "sequence_bias": {(ord(a),): 4.0, (ord(d),): 4.0},
        "eos_token_id": rng.choice([tiny.EOS, ord("q")]),
    }
    if rng.random() < 0.3:
        settings["dialect"] = SkeletonDialect(c, ":", ".", b + b, rng.choice(["reencode", "rotate"]))
        settings |= {"opening": f"So{c}X:.\n{c}Y:.{b}{b}", "max_new_tokens": settings["max_new_tokens"] + 12}
    elif rng.random() < 0.3:
        settings |= random_calls(rng, a, b, c, d)
        settings["max_new_tokens"] += 24
    return settings


def random_calls(rng: random.Random, a: str, b: str, c: str, d: str) -> dict[str, Any]:
    """Return settings of a dialect with calls, whose tags are single letters, and numbers."""
    if rng.random() < 0.5:  # the text is written on beside its paths
        dialect = CallDialect((f"{a}{{number}}", b), wait=f"{c}{{number}}", joined="{text}.", is_nested=True)
        opening = f"So {a}1xy{b}{a}2x{b} and {rng.choice(['', f'{c}2'])}"
        bias = {(ord(c),): 3.0, (ord("3"),): 3.0}
    else:
        dialect = CallDialect(
            (a, b),
            separator=d,
            prompt=rng.choice(["{message}", "Do {message}: "]),
            returned=rng.choice([("", ""), ("", c), (d, c)]),
            joined=rng.choice(["{text}", "({number} {text})"]),
            around=("/", "|"),
            keeps_call=rng.random() < 0.5,
            is_nested=rng.random() < 0.5,
        )
        opening = rng.choice(["", f"So {a}u{d}v{b}", f"Q {a}"])
        bias = {(ord(a),): 4.0, (ord(b),): 4.0}
    return {"dialect": dialect, "opening": opening, "sequence_bias": bias, "path_max_new_tokens": rng.choice([3, 10])}


def check_random_call(model: Any, seed: int) -> int:
    """Check the tokens, forks and logits of a random call. Return the number of its forks."""
    rng = random.Random(seed)
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in PROMPTS[: rng.randint(1, 3)]])
    settings = random_call(rng)
    given = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "pad_token_id": tiny.PAD, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an answer without a fork
        out = model.generate(ids, attention_mask=mask, generation_mode="fork_join", **given)
    for row, forks, length in zip(out.sequences.tolist(), out.forks, out.record.lengths, strict=True):
        tokens = row[ids.shape[1] : length]
        assert len(tokens) <= settings["max_new_tokens"]
        check_forks(tokens, forks, isinstance(settings["dialect"], CallDialect))
    check_logits(model, out)
    return sum(map(len, out.forks))


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.slow)])
def test_random_calls_keep_their_budgets_and_equal_the_training_mask(seeds: range) -> None:
    model = hf_parallel.enable(small_model())
    assert sum(check_random_call(model, seed) for seed in seeds) > 2 * len(seeds)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"apar"}))
def test_forced_forks_have_titles_by_the_model_and_equal_the_training_mask(name: str) -> None:
    dialect, model = ALL[name], hf_parallel.enable(small_model())
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in PROMPTS])
    given = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "pad_token_id": tiny.PAD, "do_sample": True}
    given |= {"force": True, "paths": 3, "path_max_new_tokens": 9, "max_new_tokens": 400, "opening": "So ", "seed": 1}
    out = model.generate(ids, attention_mask=mask, generation_mode="fork_join", dialect=dialect, **given)
    title = r"[^<\n]*\S[^<\n]*"
    plan = re.escape("So ") + title.join(map(re.escape, dialect.planned(3)))
    for text, forks in zip(out.transcripts, out.forks, strict=True):
        assert re.match(plan, text)
        assert [path.number for path in forks[0].paths] == ["1", "2", "3"]
    check_logits(model, out)


@pytest.mark.parametrize("cases", [range(1), pytest.param(range(1, 6), marks=pytest.mark.slow)])
def test_cached_logits_are_replayed_with_the_same_tokens(cases: range) -> None:
    """All of a call, and then calls with other seeds, which leave the cached contexts somewhere."""
    model, replayed = hf_parallel.enable(small_model()), 0
    for case in cases:
        settings, cache = random_call(random.Random(case)), hf_parallel.LogitsCache()
        ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in PROMPTS[: 1 + case % 3]])
        given = {"attention_mask": mask, "generation_mode": "fork_join", "tokenizer": TOKENIZER, **settings}
        given |= {"pad_token_id": tiny.PAD, "return_dict_in_generate": True, "top_k": 3, "max_new_tokens": 40}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for turn, seed in enumerate((5, 5, 6)):
                plain = model.generate(ids, **given | {"seed": seed})
                out = model.generate(ids, **given | {"seed": seed}, logits_cache=cache)
                assert torch.equal(out.sequences, plain.sequences)
                assert out.forks == plain.forks
                torch.testing.assert_close(out.log_probs, plain.log_probs, atol=1e-4, rtol=1e-4, equal_nan=True)
                if turn == 1 and out.stats.replayed_tokens:
                    assert out.stats.forward_passes == 0
                    assert out.stats.replayed_tokens == plain.stats.decoded_tokens
                replayed += seed > 5 and 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
    assert replayed


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*tiny.ARCHITECTURES, "lfm2"} - UNTRAINED))
def test_random_calls_equal_the_training_mask_on_every_architecture(name: str) -> None:
    model, checked = hf_parallel.enable(tiny.build(name)), 0
    try:
        for seed in range(12):
            with contextlib.suppress(hf_parallel.UnsupportedModelError):  # of these positions
                check_random_call(model, seed)
                checked += 1
            if checked == 3:
                break
        assert checked == 3 or enabled(model).capabilities.dense
    finally:
        hf_parallel.disable(model)
        tiny.clear_cache()
