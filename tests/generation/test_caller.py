"""Warnings about calls that did not do what their caller may expect: one per call, at the caller's line."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from stories import tell
from test_self_consistency import vote
from workers import SETTINGS, TOKENIZER, small_model, write

import hf_parallel
from hf_parallel.generation.modes.final_answers import BOXED

EOS = tiny.EOS
PROMPT = tiny.make_prompts([9], seed=4)[0][None]


def warned(call: Callable[[], Any]) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def outline(text: str) -> Any:
    settings = {"outline_start": text, "outline_tokens": 1, "max_new_tokens": 3, "tokenizer": TOKENIZER}
    return small_model().generate(PROMPT, generation_mode="skeleton_of_thought", do_sample=False, **settings)


def finish_a_session(**settings: Any) -> None:
    settings = {**SETTINGS, "max_new_tokens": 3, "do_sample": False, **settings}
    del settings["tokenizer"]
    with hf_parallel.HogwildSession(small_model(), TOKENIZER, PROMPT, **settings) as session:
        session.finish()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vote("a", "b"), "no answer to the prompt matches answer_pattern (the default, \\boxed{...}), so"),
        (
            lambda: write("a", "b", "\\boxed{1}", "d", prompts=("P", "Q"), finisher="c", answer_pattern=BOXED),
            "of 1 of 2 prompts matches answer_pattern (the default, \\boxed{...})",
        ),
        (lambda: finish_a_session(answer_pattern="never"), "of the prompt matches answer_pattern='never'"),
        (
            lambda: tell(["####A:......\n####%%%%", EOS], max_new_tokens=30),
            "in parallel for the prompt: there is 1 branch",
        ),
        (lambda: outline("no"), "in parallel for the prompt: the outline has 0 of at least 2 points"),
    ],
)
def test_a_call_without_answer_or_parallel_part_warns_once(call: Callable[[], Any], message: str) -> None:
    (said,) = warned(call)
    assert message in said


@pytest.mark.parametrize(
    "call",
    [
        lambda: vote(["\\boxed{1}", EOS], "b"),
        lambda: write("a", "b", finisher="4}"),
        lambda: write("a", "b", finisher="c"),  # no pattern was given: the task may have no answer in a box
        lambda: tell([".", EOS], branches=["a\n####", "b\n####"], titles=["A", "B"]),
        lambda: outline("1. a\n2. b\n3."),
    ],
)
def test_other_calls_do_not_warn(call: Callable[[], Any]) -> None:
    assert warned(call) == []


def test_a_warning_points_at_the_line_of_the_call() -> None:
    call = {"generation_mode": "pdos", "tokenizer": TOKENIZER, "max_new_tokens": 2, "do_sample": False}
    with pytest.warns(UserWarning, match="opened no block") as caught:
        small_model().generate(PROMPT, **call)
    (warning,) = [one for one in caught if "opened no block" in str(one.message)]
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "small_model().generate(PROMPT, **call)"
