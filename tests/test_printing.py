"""Texts that grow at the same time, printed as if one spoke after the other."""

from __future__ import annotations

import io
from typing import Any

from workers import TOKENIZER

from hf_parallel.printing import Floor, RowPrinter


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
