"""Texts that grow at the same time, printed as if one spoke after the other."""

from __future__ import annotations

import io
from typing import Any

import pytest
from workers import TOKENIZER

from hf_parallel import HogwildConfig, ParallelConfig, PDOSConfig, SelfConsistencyConfig, SkeletonOfThoughtConfig
from hf_parallel.cli.printing import Floor, RowPrinter, StepPrinter, printable


def spoken(*events: Any, headings: tuple[str, ...] = ("",)) -> str:
    out = io.StringIO()
    floor = Floor(out, headings)
    for name, *rest in events:
        getattr(floor, name)(*rest)
    floor.finish()
    return out.getvalue()


def test_one_text_has_the_floor_until_it_ends() -> None:
    events = [
        ("begin", "a", 0),
        ("begin", "b", 0),
        ("write", "b", "second"),
        ("write", "a", "fi"),
        ("write", "a", "rst"),
    ]
    assert spoken(*events) == "first\n\nsecond\n"


def test_finished_texts_come_before_unfinished_ones() -> None:
    begun = [("begin", name, 0) for name in "abcd"] + [("write", name, name) for name in "abcd"]
    assert spoken(*begun, ("close", "d"), ("close", "c"), ("close", "a"), ("write", "b", "!")) == "a\n\nd\n\nc\n\nb!\n"


def test_a_group_is_printed_before_the_next_one() -> None:
    begun = [("begin", "a", 0), ("begin", "b", 1), ("begin", "c", 0), *(("write", name, name) for name in "abc")]
    assert spoken(*begun, ("close", "b"), ("close", "a"), headings=("== 1", "== 2")) == "== 1\na\n\nc\n\n== 2\nb\n"


def test_space_around_a_text_is_not_printed_and_space_inside_it_is() -> None:
    events = [("begin", "a", 0), *(("write", "a", text) for text in (" \n", "one ", "\n", "two", "\n\n"))]
    assert spoken(*events) == "one \ntwo\n"


def test_terminal_commands_of_the_model_are_not_passed_on_to_a_terminal() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    printer = RowPrinter(out, ["\x1b[1m"], TOKENIZER)
    printer.begin(0, 0)
    printer.write(0, "a\x1b[2Jb\tc\n\x9bd")
    printer.end()
    assert out.getvalue() == "\ufffd[1m\na\ufffd[2Jb\tc\n\ufffdd\n"


def test_what_a_terminal_takes_for_commands_is_replaced() -> None:
    assert printable("a\tb\n\x1b[m\x85") == "a\tb\n\ufffd[m\ufffd"
    assert printable("a\tb\n\x1b[m\x85", kept="\n", instead=" ") == "a b\n [m "


def heard(config: ParallelConfig, *events: tuple[int, str, str], answers: int = 1, headings: Any = ("",)) -> str:
    """What has been printed when rows have written, before the end."""
    out = io.StringIO()
    printer = StepPrinter(out, headings, config, answers)
    for event in events:
        printer.write_row(*event)
    return out.getvalue()


def test_answers_of_a_vote_are_printed_while_they_are_written() -> None:
    config = SelfConsistencyConfig(num_answers=2, vote="final")
    begun = [(0, "", "begin"), (0, "one", "token"), (1, "", "begin"), (1, "two", "token")]
    assert heard(config, *begun) == "[Answer 1]\none"
    ended = [*begun, (0, "", "end"), (1, "", "end"), (2, "So ", "begin"), (2, "2", "token")]
    assert heard(config, *ended) == "[Answer 1]\none\n\n[Answer 2]\ntwo\n\n[Conclusion]\nSo 2"


def test_points_are_printed_when_they_end_and_the_conclusion_behind_them() -> None:
    outline = [(0, "1.", "begin"), (0, " a", "token"), (0, "", "end")]
    points = [(1, "1. a:", "begin"), (2, "2. b:", "begin"), (3, "3. c:", "begin"), (3, "", "end")]
    printed = "[Outline]\n1. a\n\n[Point 1]\n1. a:"
    assert heard(SkeletonOfThoughtConfig(), *outline, *points) == printed
    printed += "\n\n[Point 3]\n3. c:\n\n[Point 2]\n2. b:\n\n[Conclusion]\nAll:"
    rest = [(1, "", "end"), (2, "", "end"), (0, "All:", "begin")]
    assert heard(SkeletonOfThoughtConfig(), *outline, *points, *rest) == printed


def test_answers_of_several_sequences_say_whose_they_are() -> None:
    events = [(row, f"text {row}", "begin") for row in range(4)] + [(row, "", "end") for row in range(4)]
    assert heard(SelfConsistencyConfig(num_answers=1), *events, answers=2, headings=("== P", "== Q")) == (
        "== P\n[1 of 2, Answer 1]\ntext 0\n\n[2 of 2, Answer 1]\ntext 1\n\n"
        "== Q\n[1 of 2, Answer 1]\ntext 2\n\n[2 of 2, Answer 1]\ntext 3"
    )


def test_steps_of_several_answers_say_which_they_are_of() -> None:
    config = HogwildConfig()
    events = [(row, f"text {row}", "begin") for row in range(4)] + [(row, "", "end") for row in range(4)]
    printed = "[1 of 2]\ntext 0\n\n[1 of 2]\ntext 1\n\n[2 of 2]\ntext 2\n\n[2 of 2]\ntext 3"
    assert heard(config, *events, answers=2) == printed
    assert "[" not in heard(config, *events[:1])


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
def test_rows_of_two_prompts_have_places_and_names(
    config: ParallelConfig, row: int, place: tuple[int, int], name: str
) -> None:
    assert config.place(row, 2)[:2] == place
    assert config.row_name(place[1]) == name
