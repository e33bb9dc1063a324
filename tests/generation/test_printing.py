"""Concurrent texts are printed one after another."""

from __future__ import annotations

import io
from types import SimpleNamespace

import torch
from workers import TOKENIZER

from hf_parallel import (
    ConsoleStreamer,
    SelfConsistencyConfig,
)
from hf_parallel.transcript.record import Record


def test_terminal_commands_in_generated_text_are_not_printed_to_a_terminal() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    printer = ConsoleStreamer(TOKENIZER, out, ["\x1b[1m"])
    printer.put(torch.zeros(1, 1))
    printer.begin_call(SimpleNamespace(record=Record(SelfConsistencyConfig())))
    printer.write_row(0, "", "begin")
    printer.write_row(0, "a\x1b[2Jb\tc\n\x9bd", "token")
    printer.end()
    assert out.getvalue() == "\ufffd[1m\n[Answer 1]\na\ufffd[2Jb\tc\n\ufffdd\n"
