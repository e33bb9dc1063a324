"""Concurrent texts are printed one after another."""

from __future__ import annotations

import io
from typing import Any

import pytest
from workers import TOKENIZER

from hf_parallel import HogwildConfig, ParallelConfig, PDOSConfig, SelfConsistencyConfig, SkeletonOfThoughtConfig
from hf_parallel.cli.printing import RowPrinter, SequentialPrinter, printable


def printed(*events: Any, headings: tuple[str, ...] = ("",)) -> str:
    out = io.StringIO()
    printer = SequentialPrinter(out, headings)
    for name, *rest in events:
        getattr(printer, name)(*rest)
    printer.end()
    return out.getvalue()


def test_a_text_is_printed_until_it_ends_before_the_next_one() -> None:
    events = [
        ("begin", "a", 0),
        ("begin", "b", 0),
        ("write", "b", "second"),
        ("write", "a", "fi"),
        ("write", "a", "rst"),
    ]
    assert printed(*events) == "first\n\nsecond\n"


def test_finished_texts_are_printed_before_unfinished_ones() -> None:
    begun = [("begin", name, 0) for name in "abcd"] + [("write", name, name) for name in "abcd"]
    assert printed(*begun, ("close", "d"), ("close", "c"), ("close", "a"), ("write", "b", "!")) == "a\n\nd\n\nc\n\nb!\n"


def test_a_group_is_printed_before_the_next_one() -> None:
    begun = [("begin", "a", 0), ("begin", "b", 1), ("begin", "c", 0), *(("write", name, name) for name in "abc")]
    assert printed(*begun, ("close", "b"), ("close", "a"), headings=("== 1", "== 2")) == "== 1\na\n\nc\n\n== 2\nb\n"


def test_whitespace_is_printed_inside_a_text_but_not_around_it() -> None:
    events = [("begin", "a", 0), *(("write", "a", text) for text in (" \n", "one ", "\n", "two", "\n\n"))]
    assert printed(*events) == "one \ntwo\n"


def test_terminal_commands_in_generated_text_are_not_printed_to_a_terminal() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    printer = RowPrinter(out, ["\x1b[1m"], TOKENIZER)
    printer.begin(0, 0)
    printer.write(0, "a\x1b[2Jb\tc\n\x9bd")
    printer.end()
    assert out.getvalue() == "\ufffd[1m\na\ufffd[2Jb\tc\n\ufffdd\n"


def test_unprintable_characters_are_replaced() -> None:
    assert printable("a\tb\n\x1b[m\x85") == "a\tb\n\ufffd[m\ufffd"
    assert printable("a\tb\n\x1b[m\x85", kept="\n", replacement=" ") == "a b\n [m "


def streamed(config: ParallelConfig, *events: tuple[int, str, str], answers: int = 1, headings: Any = ("",)) -> str:
    """Return the output for events of rows, before the end of the call."""
    out = io.StringIO()
    printer = RowPrinter(out, headings, TOKENIZER, config, answers)
    for event in events:
        printer.write_row(*event)
    return out.getvalue()


def test_answers_of_a_vote_are_printed_while_they_are_generated() -> None:
    config = SelfConsistencyConfig(num_answers=2, vote="final")
    begun = [(0, "", "begin"), (0, "one", "token"), (1, "", "begin"), (1, "two", "token")]
    assert streamed(config, *begun) == "[Answer 1]\none"
    ended = [*begun, (0, "", "end"), (1, "", "end"), (2, "So ", "begin"), (2, "2", "token")]
    assert streamed(config, *ended) == "[Answer 1]\none\n\n[Answer 2]\ntwo\n\n[Conclusion]\nSo 2"


def test_points_are_printed_when_they_end_and_the_conclusion_follows() -> None:
    outline = [(0, "1.", "begin"), (0, " a", "token"), (0, "", "end")]
    points = [(1, "1. a:", "begin"), (2, "2. b:", "begin"), (3, "3. c:", "begin"), (3, "", "end")]
    expected = "[Outline]\n1. a\n\n[Point 1]\n1. a:"
    assert streamed(SkeletonOfThoughtConfig(), *outline, *points) == expected
    expected += "\n\n[Point 3]\n3. c:\n\n[Point 2]\n2. b:\n\n[Conclusion]\nAll:"
    rest = [(1, "", "end"), (2, "", "end"), (0, "All:", "begin")]
    assert streamed(SkeletonOfThoughtConfig(), *outline, *points, *rest) == expected


def test_headings_number_the_sequences_of_a_prompt() -> None:
    events = [(row, f"text {row}", "begin") for row in range(4)] + [(row, "", "end") for row in range(4)]
    assert streamed(SelfConsistencyConfig(num_answers=1), *events, answers=2, headings=("== P", "== Q")) == (
        "== P\n[1 of 2, Answer 1]\ntext 0\n\n[2 of 2, Answer 1]\ntext 1\n\n"
        "== Q\n[1 of 2, Answer 1]\ntext 2\n\n[2 of 2, Answer 1]\ntext 3"
    )


def test_steps_that_begin_with_their_authors_name_get_no_name_in_their_heading() -> None:
    config = HogwildConfig(step_prefix="{name} {step}: ")
    begun = [(row, f"{name} 1: ", "begin") for row, name in enumerate(("Alice", "Bob") * 2)]
    events = [*begun, *((row, "", "end") for row in range(4))]
    expected = "[1 of 2]\nAlice 1:\n\n[1 of 2]\nBob 1:\n\n[2 of 2]\nAlice 1:\n\n[2 of 2]\nBob 1:"
    assert streamed(config, *events, answers=2) == expected
    assert streamed(config, *events[:1]) == "Alice 1:"


@pytest.mark.parametrize(
    ("config", "row", "place", "name"),
    [
        (HogwildConfig(num_workers=3), 4, (1, 1), "Bob"),
        (SelfConsistencyConfig(num_answers=3), 5, (1, 2), "Answer 3"),
        (SelfConsistencyConfig(num_answers=3), 7, (1, 3), "Conclusion"),
        (SkeletonOfThoughtConfig(), 1, (1, 0), "Outline"),
        (SkeletonOfThoughtConfig(), 4, (0, 2), "Point 2"),
        (PDOSConfig(), 3, (1, 1), "Branch 1"),
    ],
)
def test_rows_of_two_prompts_have_positions_and_names(
    config: ParallelConfig, row: int, place: tuple[int, int], name: str
) -> None:
    assert config.place(row, 2)[:2] == place
    assert config.row_name(place[1]) == name
