"""Judge of collaboration: prompt, replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hf_parallel.evaluation.judge import (
    UnreadableReplyError,
    judge,
    read_reply,
)


def replies(*texts: str) -> Any:
    """Return a function that returns texts one after another, and the prompts it receives."""
    left: Iterator[str] = iter(texts)
    prompts: list[str] = []

    def complete(prompt: str) -> str:
        prompts.append(prompt)
        return next(left)

    return complete, prompts


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("Reason: they split the task.\nScore: 3", (3, "they split the task.")),
        ("Score: 4\nReason: they check results.", (4, "they check results.")),
        ("**Reason:** two\nlines here\n\n**Score:** 5", (5, "two lines here")),
        ('{"reason": "alone", "score": 1}', (1, "alone")),
        ("score = 6/6", (6, "")),
        ("<think>Score: 1? or 2</think>Reason: x\nScore: 2", (2, "x")),
        ("Score: 3\nSo, Score: 3", (3, "")),
        ("Score: 3 or Score: 4", None),
        ("Score: 7", None),
        ("Score: 45", None),
        ("Score: 3.5", None),
        ("", None),
        ("Score:" + " " * 100_000, None),
        ("Reason: " * 20_000, None),
    ],
)
def test_a_reply_with_exactly_one_score_is_read(reply: str, found: tuple[int, str] | None) -> None:
    assert read_reply(reply) == found


def test_an_unreadable_reply_is_asked_again() -> None:
    complete, prompts = replies("I solve the problem: 42.", "Reason: r\nScore: 4")
    found = judge("text", complete)
    assert (found.score, found.reason, found.scores) == (4.0, "r", (4,))
    assert "no line with one score" in prompts[1]
    complete, _ = replies("a", "b", "Score: nine")
    with pytest.raises(UnreadableReplyError, match="3 replies.*nine"):
        judge("text", complete)
