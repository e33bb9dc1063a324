"""Calls of Skeleton-of-Thought: cost, interrupts, streamers, invalid settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import pass_sizes
from test_malformed import describe, failing
from test_self_consistency import Foreign, Listener
from test_skeleton_of_thought import (
    BLANKS,
    DEFAULT,
    EOS,
    POINTS,
    STOP_BLANK,
    greedy,
    scripts,
    write,
)
from workers import TOKENIZER, encode, small_model

from hf_parallel import BlockCache, SharedPrefixCache

pytestmark = pytest.mark.usefixtures("one_thread")


# Cost


@pytest.mark.parametrize(("workers", "steps"), [(None, 6), (3, 6), (2, 8), (1, 15)])
def test_the_next_point_starts_when_one_ends(workers: int | None, steps: int) -> None:
    """Points of 7, 3 and 6 tokens: with two workers, the third point starts after the second."""
    with pass_sizes() as sizes:
        out = write(scripts("x" * 6, "yy", "z" * 5), point_workers=workers, conclusion_tokens=0)
    assert out.texts == ["1. a:xxxxxx|2. b:yy|3. c:zzzzz"]
    outline, *points = 1 + len(POINTS), *sizes[1 + len(POINTS) :]
    assert len(points) == 1 + steps, "the prompts of all points are prefilled in one pass"
    assert max(points[1:]) == (workers or 3)
    assert sum(points[1:]) == 7 + 3 + 6 - (workers or 3), "the last prompt token of a later point is computed again"
    assert out.stats.forward_passes == outline + len(points)
    assert out.stats.decoded_tokens == len(POINTS) + 1 + 7 + 3 + 6


@pytest.mark.parametrize("workers", [None, 1])
def test_shared_prefixes_are_computed_once(workers: int | None) -> None:
    out = write(scripts("xx", "y", "zz", end=""), ["Long prompt", "Long"], point_workers=workers)
    read = [encode(prompt + "[OUTLINE]1.") for prompt in ("Long prompt", "Long")]
    read += [point.prompt for points in out.points for point in points]
    read += [encode(prompt + text) for prompt, text in zip(("Long prompt", "Long"), out.texts, strict=True)]
    unique = {tuple(tokens[: i + 1]) for tokens in read for i in range(len(tokens))}
    computed_again = 0 if workers is None else 2 * 2
    assert out.stats.prefilled_tokens == len(unique) + computed_again


# Interrupts and arbitrary text


@pytest.mark.parametrize("at", [1, 4, 2 + len(POINTS), 4 + len(POINTS), 10 + len(POINTS)])
def test_an_interrupt_harms_neither_model_nor_kept_cache(at: int) -> None:
    model, cache = small_model(), SharedPrefixCache()
    before, expected = describe(model), greedy(model, encode("PQR"))
    more = {"max_new_tokens": 5, "outline_tokens": 20, "point_workers": 2}
    with pytest.raises(KeyboardInterrupt), failing(model.model.layers[1], at, KeyboardInterrupt()):
        write({"[OUTLINE]1.": POINTS}, ["PQR"], past_key_values=cache, **more)
    assert describe(model) == before
    assert greedy(model, encode("PQR")) == expected
    assert {node.block for node in cache.tree.nodes()} == cache.pool.blocks, "leaked blocks"
    again = write({"[OUTLINE]1.": POINTS}, ["PQR"], past_key_values=cache, **more)
    fresh = write({"[OUTLINE]1.": POINTS}, ["PQR"], **more)
    assert again.points == fresh.points
    assert again.texts == fresh.texts


PIECES = st.sampled_from([*"ab.: \n", "1. ", "2. c\n", "3) **d**\n", "{x}", "\\boxed{", EOS, STOP_BLANK, BLANKS])


@settings(max_examples=30, deadline=None)
@given(
    outline=st.lists(PIECES, max_size=12),
    point=st.lists(PIECES, max_size=5),
    end=st.lists(PIECES, max_size=3),
    budgets=st.tuples(st.integers(1, 30), st.integers(1, 4), st.integers(0, 3)),
    workers=st.sampled_from([None, 1, 2]),
)
def test_no_generated_text_is_lost(
    outline: list[Any], point: list[Any], end: list[Any], budgets: tuple[int, int, int], workers: int | None
) -> None:
    replies = {"[OUTLINE]1.": outline, "~": point, "[END]": end}
    names = ("outline_tokens", "point_tokens", "conclusion_tokens")
    more = dict(zip(names, budgets, strict=True))
    out = write(replies, max_new_tokens=3, point_workers=workers, point_end="\n", point_heading="{point}~", **more)
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


# Streaming


def test_a_parallel_streamer_receives_every_text() -> None:
    listener = Listener()
    replies = {**scripts("xx", "y"), "Q[OUTLINE]1.": ""}
    out = write(replies, ["P", "Q"], streamer=listener, max_new_tokens=12, outline_tokens=20)
    received = {row: "".join(text for text, _ in events) for row, events in listener.rows.items()}
    assert received[0] == "1." + POINTS + "[END]e"
    assert received[1] == "1." + out.texts[1]
    assert {row: received[row] for row in (2, 4)} == {2: "1. a:xx", 4: "2. b:y"}
    assert received[6].startswith("3. c:")
    assert listener.rows[2] == [("1. a:", "begin"), ("x", "token"), ("x", "token"), ("", "token"), ("", "end")]
    prompts, *columns = listener.put_tokens
    assert torch.equal(torch.tensor(columns).T, out.sequences[:, 1:])
    assert listener.ended == 1


# Invalid settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"conclusion_prompt": None}, "conclusion_prompt must be .*got None"),
        ({"point_prompt": "{who}"}, "point_prompt may hold"),
        ({"point_heading": "{"}, "point_heading"),
        ({"point_pattern": "("}, "point_pattern must be"),
        ({"point_pattern": r"\d+"}, "point_pattern must have a group"),
        ({"min_points": 4, "max_points": 3}, "max_points must be .*got 3"),
        ({"point_workers": 0}, "point_workers must be .*got 0"),
        ({"conclusion_tokens": -1}, "conclusion_tokens must be .*got -1"),
        ({"workers": 2}, "did you mean 'point_workers'"),
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
