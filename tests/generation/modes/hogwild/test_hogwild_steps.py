"""Steps, histories, answers and the early finisher of Hogwild! workers that write scripts."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from workers import FILLER, TOKENIZER, Recording, Script, encode, write

EOS = tiny.EOS
BLANK, STOP_BLANK, BLANKS, FENCE, TWO_BLANKS = 3, 4, 5, 6, 7  # tokens that contain a separator or a code fence
BOX = "\\boxed{"


def steps(out: Any, problem: int = 0) -> list[tuple[str, bool]]:
    """Return the text of each step in the history, and whether it is finished."""
    return [(step.text, step.forward_pass is not None) for step in out.history[problem]]


# Where a step ends


@pytest.mark.parametrize(
    "script",
    [
        ["A cat.", BLANK],
        ["(A cat.)\n", "\n"],
        ["A cat, ", TWO_BLANKS],
        [FENCE, "x = 1.", BLANK, "y", STOP_BLANK, FENCE, " So.", BLANK],
    ],
    ids=repr,
)
def test_a_step_ends_at_a_separator_after_a_sentence(script: Script) -> None:
    out = write([*script, "Next"])
    text = TOKENIZER.decode(encode(script))
    assert steps(out) == [(f"Alice 1: {text}", True), ("Alice 2: Next", False)]
    assert out.history[0][0].forward_pass == len(encode(script))


# The history


@pytest.mark.parametrize(
    ("layout", "seen_by_alice", "seen_by_bob"),
    [
        (
            "combined",
            "P[DONE]Bob 1: b.\n\n[OTHERS]Bob 2: two [ME]Alice 1: hello th",
            "P[DONE]Bob 1: b.\n\n[OTHERS]Alice 1: hello th[ME]Bob 2: two ",
        ),
        ("interleaved", "P[DONE]Bob 1: b.\n\n[ME]Alice 1: hello th", "P[DONE]Bob 1: b.\n\n[ME]Bob 2: two "),
        (
            "contiguous",
            "P[OTHERS]Bob 1: b.\n\nBob 2: two [ME]Alice 1: hello th",
            "P[OTHERS]Alice 1: hello th[ME]Bob 1: b.\n\nBob 2: two ",
        ),
    ],
)
def test_each_layout_shows_the_steps_of_appendix_a(layout: str, seen_by_alice: str, seen_by_bob: str) -> None:
    """The latest tokens of other workers are visible in the same pass."""
    recording = Recording()
    write("hello the", "b.\n\ntwo b", layout=layout, max_new_tokens=9)
    assert recording.passes[-1].seen[-2:] == [seen_by_alice, seen_by_bob]


def test_openings_follow_the_first_step_prefix() -> None:
    out = write("a.\n\nb", "c", openings=["Hi! ", "I agree: "])
    assert steps(out) == [("Alice 1: Hi! a.\n\n", True), ("Alice 2: b", False), ("Bob 1: I agree: cxxxx", False)]
    assert steps(write("a", "b", openings=["", "I agree: "])) == [("Alice 1: a", False), ("Bob 1: I agree: b", False)]
    with pytest.raises(ValueError, match="openings must be 2 texts"):
        write("a", "b", openings=["Hi!"])


def test_steps_that_do_not_move_cannot_be_computed_again() -> None:
    with pytest.raises(ValueError, match="step_move must be 'rotate' .* got 'reencode' with .*layout='contiguous'"):
        write("a", "b", layout="contiguous", step_move="reencode")


def test_the_redundancy_prompt_begins_the_next_step_after_the_interval() -> None:
    """Counted over all workers: the first to end a step 10 tokens after the last prompt gets the next one."""
    out = write("aaa.\n\nbbbbb.\n\nc", "dd.\n\nee.\n\nf", redundancy_interval=10, redundancy_prompt="Again? ")
    texts = [(step.name, step.text) for step in out.history[0]]
    assert texts == [
        ("Bob", "Bob 1: dd.\n\n"),
        ("Alice", "Alice 1: aaa.\n\n"),
        ("Bob", "Bob 2: Again? ee.\n\n"),
        ("Alice", "Alice 2: bbbbb.\n\n"),
        ("Alice", "Alice 3: c"),
        ("Bob", "Bob 3: Again? fxxxx"),
    ]


# Answers


def test_any_answer_stops_all_workers_of_the_prompt() -> None:
    out = write("hello world hello world", f"so {BOX}7}} and more", "zz")
    passes = len(f"so {BOX}7}}")
    assert out.answers == ["7"]
    assert [step.text for step in out.history[0]] == [
        f"Bob 1: so {BOX}7}}",
        "Carol 1: " + ("zz" + FILLER * 99)[:passes],
        "Alice 1: " + "hello world hello world"[:passes],
    ]
    assert [step.forward_pass for step in out.history[0]] == [passes, None, None]
    assert out.stats.decoded_tokens == 3 * passes


# The early finisher


@pytest.mark.parametrize("layout", ["combined", "interleaved", "contiguous"])
def test_the_finisher_reads_everything_and_answers(layout: str) -> None:
    recording = Recording()
    out = write("a.\n\nhello", "there", "C.\n\n??", finisher="12}zzz", layout=layout)
    everything = {
        "combined": "P[DONE]Alice 1: a.\n\nCarol 1: C.\n\n[OTHERS]Alice 2: hello|Bob 1: therexxxx[ME]Carol 2: ??xxx",
        "contiguous": "P[OTHERS]Alice 1: a.\n\nAlice 2: hello|Bob 1: therexxxx[ME]Carol 1: C.\n\nCarol 2: ??xxx",
    }
    passes = recording.passes
    assert passes[-3].seen[-1] == everything.get(layout, everything["combined"]) + f"So {BOX}"
    assert passes[-1].appended == ["2"]
    assert (out.answers, out.conclusions) == (["12"], [f"So {BOX}12}}"])
    assert out.stats.decoded_tokens == 3 * 9 + 3


@pytest.mark.parametrize("off", [{"finisher_tokens": 0}, {"finisher_prompt": ""}, {"answer_pattern": ""}])
def test_the_finisher_can_be_disabled(off: dict[str, Any]) -> None:
    out = write("aaa", "bbb", finisher="2}", **off)
    assert (out.answers, out.conclusions) == ([None], [""])
    assert out.stats.decoded_tokens == 2 * 3


# Workers that end early


@pytest.mark.parametrize("layout", ["combined", "interleaved", "contiguous"])
def test_a_stopped_worker_costs_nothing_while_the_others_continue(layout: str) -> None:
    recording = Recording()
    out = write(["aa", EOS], "bbbbbbbb", "cccc", layout=layout)
    tokens = [forward.num_tokens for forward in recording.passes[2:]]
    closing = len("\n\n") if layout != "contiguous" else 0  # its step joins the history
    assert tokens == [3, 3, 2 + closing, 2, 2, 2, 2]
    assert steps(out)[0] == ("Alice 1: aa", True)
    assert out.stats.decoded_tokens == 3 + 8 + 8
