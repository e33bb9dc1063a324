"""Consoles whose output tests read."""

from __future__ import annotations

import io

from rich.console import Console


def a_terminal(width: int = 80, height: int = 24) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, highlight=False)


def a_pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
