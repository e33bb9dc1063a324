"""Skeleton-of-Thought: outlines, points side by side, conclusions, and answers without an outline."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import pass_sizes
from test_malformed import describe
from test_self_consistency import Foreign
from transformers import LogitsProcessor, PreTrainedModel
from workers import TOKENIZER, Script, encode, small_model

import hf_parallel
from hf_parallel import BlockCache, SkeletonOfThoughtConfig, SkeletonOfThoughtOutput

EVERY_SETTING: dict[str, Any] = {
    "seed": [1, 2, 3],
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "replay": "hotspot",
    "prefetch": True,
    "outline_prompt": "Outline:\n",
    "outline_start": "* ",
    "point_pattern": "\\* (.+)",
    "min_points": 3,
    "max_points": 5,
    "point_prompt": "{skeleton}\nNow {number}: ",
    "point_heading": "{point}:\n",
    "point_end": "\n\n",
    "point_gap": "\n",
    "conclusion_prompt": "So ",
    "outline_tokens": 9,
    "point_tokens": 8,
    "conclusion_tokens": 7,
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {
    "outline_prompt": "List:\n",
    "point_prompt": "Q:",
    "point_heading": "",
    "point_gap": "|",
    "conclusion_prompt": "=",
    "outline_tokens": 4,
    "point_tokens": 3,
    "min_points": 1,
}
"""Arguments of a short call with a tiny model."""

EOS = tiny.EOS
STOP_BLANK, BLANKS = 4, 5  # tokens that hold a full stop and blank lines, and blank lines alone
NEW = 8
TEXTS: dict[str, Any] = {
    "outline_prompt": "[OUTLINE]",
    "outline_start": "1.",
    "point_prompt": "[POINTS]{skeleton}[NOW]",
    "point_heading": "{number}. {point}:",
    "point_end": "",
    "point_gap": "|",
    "conclusion_prompt": "[END]",
}
"""Short texts, so that tests can spell out prompts."""
POINTS = " a\n2. b\n3. c"
"""Continuation of an outline of three points."""


class Replies(LogitsProcessor):
    """Forces rows whose prompt ends with a key to write its script and end; others decode greedily.

    Of keys that end alike, the longest counts.
    """

    keeps_rows = False

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        longest_first = sorted(scripts, key=len, reverse=True)
        self.scripts = {tuple(encode(key)): [*encode(scripts[key]), EOS] for key in longest_first}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = scores.clone()
        for row, tokens in enumerate(input_ids.tolist()):
            token = self._next(tokens)
            if token is not None:
                chosen[row] = -100.0
                chosen[row, token] = 100.0
        return chosen

    def _next(self, tokens: list[int]) -> int | None:
        for key, script in self.scripts.items():
            for written in range(min(len(script), len(tokens) - len(key) + 1)):
                end = len(tokens) - written
                if tuple(tokens[end - len(key) : end]) == key and tokens[end:] == script[:written]:
                    return script[written]
        return None


def write(
    scripts: Mapping[str, Script], prompts: Sequence[str] = ("P",), model: PreTrainedModel | None = None, **more: Any
) -> Any:
    """Generate with scripts by the end of a row's prompt; by default with a budget that fits all of them."""
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {
        "tokenizer": TOKENIZER,
        "max_new_tokens": 40,
        "do_sample": False,
        "return_dict_in_generate": True,
        "logits_processor": [Replies(scripts)],
        **TEXTS,
        **more,
    }
    model = small_model() if model is None else model
    return model.generate(ids, attention_mask=mask, generation_mode="skeleton_of_thought", **given)  # type: ignore[operator]


def scripts(*points: Script, outline: Script = POINTS, end: Script = "e") -> dict[str, Script]:
    """Scripts for an outline of three points, for the points and the conclusion."""
    keys = (f"{number}. {title}:" for number, title in enumerate("abc", start=1))
    return {"[OUTLINE]1.": outline, "[END]": end, **dict(zip(keys, points, strict=False))}


def greedy(model: PreTrainedModel, tokens: Sequence[int], new: int = NEW, **more: Any) -> list[int]:
    """Return the greedy completion of tokens by `generate`."""
    ids = torch.tensor([list(tokens)])
    out = model.generate(ids, generation_mode=None, do_sample=False, max_new_tokens=new, **more)  # type: ignore[operator]
    return out[0, len(tokens) :].tolist()


# Equal to generate


def test_without_return_dict_the_answer_is_the_same() -> None:
    written = scripts("x", "y", "z")
    tensor = write(written, return_dict_in_generate=False)
    assert tensor.tolist() == write(written).sequences.tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "lfm2"])
def test_points_and_conclusion_equal_greedy_generate_on_their_prompts(name: str) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    budgets = {"max_new_tokens": NEW, "outline_tokens": 20}
    out = write({"[OUTLINE]1.": POINTS}, ["PQRST", "U"], model, **budgets)
    for row, prompt in enumerate(("PQRST", "U")):
        assert [point.title for point in out.points[row]] == ["a", "b", "c"]
        for point in out.points[row]:
            assert point.prompt == encode(f"{prompt}[POINTS]1. a\n2. b\n3. c[NOW]{point.number}. {point.title}:")
            assert point.tokens == greedy(model, point.prompt)
            assert point.text == TOKENIZER.decode(point.tokens)
        whole = out.sequences[row, 5 - len(prompt) :].tolist()
        points = "|".join(f"{point.number}. {point.title}:{point.text}" for point in out.points[row])
        assert TOKENIZER.decode(whole[:-NEW]) == f"{prompt}{points}|[END]"
        assert whole[-NEW:] == greedy(model, whole[:-NEW])
    assert len({tuple(point.tokens) for points in out.points for point in points}) == 6, "all points are alike"


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_without_an_outline_the_answer_is_what_generate_gives(name: str) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    out = write({"[OUTLINE]1.": " only one"}, ["PQRST", "U"], model, max_new_tokens=NEW, outline_tokens=20)
    assert out.fallback == ["the outline has 1 of at least 2 points"] * 2
    for row, prompt in enumerate(("PQRST", "U")):
        assert out.sequences[row, 5:].tolist() == greedy(model, encode(prompt))
    assert out.outlines == ["1. only one"] * 2
    assert (out.points, out.conclusions) == ([[], []], ["", ""])
    assert out.texts == [TOKENIZER.decode(row) for row in out.sequences[:, 5:].tolist()]


# Outlines

DEFAULT = SkeletonOfThoughtConfig(max_points=4)


@pytest.mark.parametrize(
    ("outline", "points"),
    [
        ("1. Bread\n2. Butter\n", ["Bread", "Butter"]),
        ("1. **Bread:**\n2. **Butter**: \n3. ", ["Bread", "Butter"]),
        ("1. Bread: white\n\n2. 2 eggs", ["Bread: white", "2 eggs"]),
        ("Well:\n\n1. Bread\n- fresh\n2. Butter\n\nThat is all.", ["Bread", "Butter"]),
        ("1. Bread\n2. Butter\n3. Bread\n4. Jam", ["Bread", "Butter", "Jam"]),
        ("1. a\n2. b\n3. c\n4. d\n5. e", ["a", "b", "c", "d"]),
        ("- Bread\n- Butter", []),
        ("1.\n2.\n", []),
    ],
)
def test_points_are_read_from_an_outline(outline: str, points: list[str]) -> None:
    assert DEFAULT.read_points(outline) == points


# The answer


def test_the_answer_is_put_together_from_headings_points_and_conclusion() -> None:
    out = write(scripts("xxx", "", "zz", end="done"))
    assert isinstance(out, SkeletonOfThoughtOutput)
    text = "1. a:xxx|2. b:|3. c:zz|[END]done"
    assert out.texts == [text]
    assert out.sequences.tolist() == [[*encode("P" + text), EOS]]
    assert out.conclusions == ["[END]done"]
    assert out.outlines == ["1." + POINTS]
    assert [(p.number, p.title, p.text) for p in out.points[0]] == [(1, "a", "xxx"), (2, "b", ""), (3, "c", "zz")]
    assert out.points[0][0].tokens == [*encode("xxx"), EOS]
    assert out.fallback == [None]


# Cost


def test_points_decode_in_the_same_passes() -> None:
    """Points of 7, 3 and 6 tokens."""
    with pass_sizes() as sizes:
        out = write(scripts("x" * 6, "yy", "z" * 5), conclusion_tokens=0)
    assert out.texts == ["1. a:xxxxxx|2. b:yy|3. c:zzzzz"]
    outline, *points = 1 + len(POINTS), *sizes[1 + len(POINTS) :]
    assert len(points) == 7, "the prompts of all points are prefilled in one pass"
    assert points[1:] == [3, 3, 2, 2, 2, 1]
    assert out.stats.forward_passes == outline + len(points)
    assert out.stats.decoded_tokens == len(POINTS) + 1 + 7 + 3 + 6


def test_shared_prefixes_are_computed_once() -> None:
    out = write(scripts("xx", "y", "zz", end=""), ["Long prompt", "Long"])
    read = [encode(prompt + "[OUTLINE]1.") for prompt in ("Long prompt", "Long")]
    read += [point.prompt for points in out.points for point in points]
    read += [encode(prompt + text) for prompt, text in zip(("Long prompt", "Long"), out.texts, strict=True)]
    unique = {tuple(tokens[: i + 1]) for tokens in read for i in range(len(tokens))}
    assert out.stats.prefilled_tokens == len(unique)


# Interrupts and arbitrary text


PIECES = st.sampled_from([*"ab.: \n", "1. ", "2. c\n", "3) **d**\n", "{x}", "\\boxed{", EOS, STOP_BLANK, BLANKS])


@settings(max_examples=30)
@given(
    outline=st.lists(PIECES, max_size=12),
    point=st.lists(PIECES, max_size=5),
    end=st.lists(PIECES, max_size=3),
    budgets=st.tuples(st.integers(1, 30), st.integers(1, 4), st.integers(0, 3)),
)
def test_no_generated_text_is_lost(
    outline: list[Any], point: list[Any], end: list[Any], budgets: tuple[int, int, int]
) -> None:
    replies = {"[OUTLINE]1.": outline, "~": point, "[END]": end}
    names = ("outline_tokens", "point_tokens", "conclusion_tokens")
    more = dict(zip(names, budgets, strict=True))
    out = write(replies, max_new_tokens=3, point_end="\n", point_heading="{point}~", **more)
    tokens = out.sequences[0, 1:].tolist()
    answer = [token for token in tokens if token != EOS]
    assert TOKENIZER.decode(answer) == out.texts[0]
    assert out.outlines[0] == "1." + TOKENIZER.decode(until_end(outline, budgets[0]))[: len(out.outlines[0]) - 2]
    if out.fallback[0] is not None:
        assert len(set(DEFAULT.read_points(out.outlines[0]))) <= 2  # a last line may have been cut off
        assert tokens == greedy(small_model(), encode("P"), 3)
        return
    assert len(out.points[0]) >= 2
    for found in out.points[0]:
        assert f"{found.title}~{found.text}" in out.texts[0]
        assert TOKENIZER.decode(until_end(point, budgets[1])).startswith(found.text)
    assert out.texts[0].endswith(out.conclusions[0])
    assert bool(out.conclusions[0]) == bool(budgets[2])


def until_end(script: Sequence[str | int], budget: int) -> list[int]:
    """Return the tokens of a script up to its end or a budget."""
    tokens = encode(script)[:budget]
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


# Invalid settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"point_prompt": "{who}"}, "point_prompt may hold"),
        ({"point_pattern": "("}, "point_pattern must be"),
        ({"point_pattern": r"\d+"}, "point_pattern must have a group"),
        ({"min_points": 4, "max_points": 3}, "max_points must be .*got 3"),
        ({"tokenizer": None}, "tokenizer"),
        ({"tokenizer": Foreign()}, "vocabulary"),
        ({"output_scores": True}, "output_scores"),
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "prefix_allowed_tokens_fn"),
        ({"past_key_values": BlockCache()}, "got BlockCache"),
    ],
)
def test_invalid_settings_raise_and_the_model_works_as_before(given: dict[str, Any], says: str) -> None:
    before = describe(small_model())
    with pytest.raises(ValueError, match=says):
        write(scripts("x", "y", "z"), **given)
    assert describe(small_model()) == before
