"""fork_join: answers in the formats of trained models, whose forks the scripted model opens by itself."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hybrids  # noqa: F401 # adds models whose layers keep states
import pytest
import tiny
import torch
from transformers import LogitsProcessor
from workers import TOKENIZER, encode, small_model

import hf_parallel
from hf_parallel import Fork, ForkJoinOutput
from hf_parallel.generation.dialects import DIALECTS, Dialect
from hf_parallel.generation.enabled import enabled
from hf_parallel.training import ParallelExample, teacher_forced_logits

EVERY_SETTING: dict[str, Any] = {
    "seed": 7,
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "replay": "hotspot",
    "prefetch": True,
    "dialect": {"region": ["<A>", "</A>"], "branch": ["<B>", "</B>"], "positions": "reencode"},
    "opening": "So",
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
PROMPTS = ("Think: ", "And ", "Well, now: ")
OVERLAP = Dialect(("<P>", "</P>"), ("<B>", "</B>"), "overlap")
UNTRAINED = {"llama4_text", "ministral3"}
"""Models without training on packed rows, which is the oracle."""
ALL = {**DIALECTS, "overlap": OVERLAP}


@dataclass
class Story:
    """Texts of a lane, with a fork between two of them: the contents of its paths."""

    texts: list[str]
    forks: list[list[Story]] = field(default_factory=list)


def make_story(rng: random.Random, dialect: Dialect, depth: int = 0, number: str = "") -> Story:
    """Return a random answer, or a path, with forks in it."""
    word = lambda: "".join(rng.choices("abcdefgh ,", k=rng.randint(1, 9)))  # noqa: E731
    story, end = Story([]), ""
    for _ in range(rng.choice([0, 1, 2]) if depth < (2 if dialect.is_nested else 1) else 0):
        count = rng.randint(1, 3) if dialect.outline else 2
        prefix = f"{number}." if number else ""
        numbers = [f"{prefix}{i}" for i in range(1, count + 1)]
        outline = "".join(f"{dialect.outline} {n}: {word()}\n" for n in numbers) if dialect.outline else ""
        closing = dialect.fork_text if dialect.fork_text != dialect.region[0] else ""
        story.texts.append(f"{end}{word()}{dialect.region[0]}{outline}{closing}")
        end = word() + ("" if dialect.region[1] in dialect.joined_text else dialect.region[1])
        paths = [make_story(rng, dialect, depth + 1, n) for n in numbers]
        story.forks.append(paths if dialect.outline else paths[:1] * count)  # these have the same beginning
    last = dialect.branch[1] if depth else ""
    story.texts.append(f"{end}{word()}{last}")
    return story


def write(story: Story, dialect: Dialect, begun: str, script: dict[str, str | None]) -> str:
    """Add what follows each beginning of a row's text to a script. Return the whole text, paths in order."""
    text = begun
    for index, own in enumerate(story.texts):
        for character in own:
            script[text] = character
            text += character
        if index < len(story.forks):
            paths = []
            for number, path in enumerate(story.forks[index], start=1):
                gap, opening = dialect.first_text(number_of(own, dialect, number))
                whole = write(path, dialect, text + gap + opening, script)
                paths.append(whole[len(text + gap) :] + dialect.gap)
            text += gap + "".join(paths) + dialect.joined_text
    return text


def number_of(own: str, dialect: Dialect, number: int) -> str:
    """Return the number of a path in its region."""
    return dialect.numbers(own[own.rindex(dialect.region[0]) :], 2)[number - 1]


class Storyteller(LogitsProcessor):
    """Lets each row write what follows its text in a script."""

    def __init__(self, script: dict[str, str | None]) -> None:
        self.script = script

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        told = torch.full_like(scores, -100.0)
        for row, tokens in enumerate(input_ids.tolist()):
            text = "".join(map(chr, tokens)).strip(chr(tiny.PAD))
            told[row, ord(self.script.get(text) or chr(tiny.EOS))] = 100.0
        return told


def tell(stories: Sequence[Story], dialect: Dialect, model: Any = None, **settings: Any) -> tuple[list[str], Any]:
    """Return the texts of scripted answers, and the output of the mode."""
    script: dict[str, str | None] = {}
    prompts = PROMPTS[: len(stories)]
    texts = [
        write(*pair, script)[len(pair[2]) :] for pair in zip(stories, [dialect] * len(stories), prompts, strict=True)
    ]
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {"max_new_tokens": 3000, "do_sample": False, "return_dict_in_generate": True, **settings}
    out = (model or small_model()).generate(
        ids,
        attention_mask=mask,
        generation_mode="fork_join",
        dialect=dialect,
        tokenizer=TOKENIZER,
        logits_processor=[Storyteller(script)],
        **given,
    )
    return texts, out


def stories(seed: int, dialect: Dialect) -> Iterator[Story]:
    rng = random.Random(seed)
    return (make_story(rng, dialect) for _ in PROMPTS)


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
    texts, out = tell(list(stories(seed, dialect)), dialect, model)
    assert [text.removesuffix("<eos>") for text in out.transcripts] == texts
    check_logits(model, out)
    examples = [
        ParallelExample.from_text(text, TOKENIZER, dialect, prompt=encode(prompt))
        for text, prompt in zip(texts, PROMPTS, strict=True)
    ]
    ran, trained = placed(ParallelExample.from_output(out)), placed(ParallelExample.pack(examples))
    assert not ran - trained
    uncomputed = trained - ran  # the last token of a path that is computed again as plain text
    assert all(token == ord(">") for _, token in uncomputed)
    assert not uncomputed or dialect.positions == "reencode"


def check_forks(tokens: list[int], forks: Sequence[Fork]) -> None:
    """The paths of forks are their slices of the tokens."""
    end = 0
    for fork in forks:
        assert end <= fork.start < fork.end <= len(tokens)
        assert tokens[fork.start : fork.end] == [token for path in fork.paths for token in path.tokens]
        end = fork.end
        for path in fork.paths:
            check_forks(path.tokens, path.forks)


def random_call(rng: random.Random) -> dict[str, Any]:
    """Return a call in whose dialect single letters are tags, so that a random model forks now and then."""
    a, b, c, d = rng.sample("etaoinshrb", 4)
    dialect = Dialect(
        (a, b),
        (c, d),
        rng.choice(["depth", "overlap", "reencode"]),
        gap=rng.choice(["", "\n"]),
        joined=rng.choice(["", "}}", "}"]),
        opening=rng.choice(["", c + "{number}:", "\n" + c]),
        is_nested=rng.random() < 0.8,
    )
    return {
        "dialect": dialect,
        "opening": rng.choice(["", "So", f"{a}, {c}"]),
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
        check_forks(tokens, forks)
    check_logits(model, out)
    return sum(map(len, out.forks))


def test_random_calls_keep_their_budgets_and_equal_the_training_mask() -> None:
    model = hf_parallel.enable(small_model())
    assert sum(check_random_call(model, seed) for seed in range(12)) > 20


def test_cached_logits_are_replayed_with_the_same_tokens() -> None:
    """All of a call, and then calls with other seeds, which leave the cached contexts somewhere."""
    model, replayed = hf_parallel.enable(small_model()), 0
    for case in range(2):
        settings, cache = random_call(random.Random(case)), hf_parallel.LogitsCache()
        ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in PROMPTS[: 1 + case % 3]])
        given = {"attention_mask": mask, "generation_mode": "fork_join", "tokenizer": TOKENIZER, **settings}
        given |= {"pad_token_id": tiny.PAD, "return_dict_in_generate": True, "top_k": 3, "max_new_tokens": 40}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for seed in (5, 5, 6):
                plain = model.generate(ids, **given | {"seed": seed})
                out = model.generate(ids, **given | {"seed": seed}, logits_cache=cache)
                assert torch.equal(out.sequences, plain.sequences)
                assert out.forks == plain.forks
                torch.testing.assert_close(out.log_probs, plain.log_probs, atol=1e-4, rtol=1e-4, equal_nan=True)
                if seed == 5 and out.stats.replayed_tokens:
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
