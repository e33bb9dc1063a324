"""LiveView: the rows of a call as growing columns in a terminal. It needs rich: pip install 'hf_parallel[demo]'."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

import torch
from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.printing import ConsoleStreamer, PrintedText, printable

COLORS = ("cyan", "magenta", "yellow", "blue", "green", "red")
FRAME_SECONDS = 0.08  # minimum time between two frames
MIN_WIDTH, MIN_HEIGHT, MAX_HEIGHT = 24, 6, 18  # of a column's text
MARGIN = 12  # lines of the terminal besides the text of the columns


class LiveView(ConsoleStreamer):
    """`ConsoleStreamer` that shows the rows as growing columns, as many as fit, unfinished rows first.

    Use it as a context manager. A terminal shows frames while rows are generated; at the end, and on other consoles,
    the full text of all rows is printed once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        super().__init__(tokenizer, StringIO())
        self.console = console
        self.call: GenerationCall | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        self.console.print(self.picture())

    def begin_call(self, call: GenerationCall) -> None:
        super().begin_call(call)
        self.call, self._prints_text = call, call.record.config.traits.streams_text

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self._draw()

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text of a row; see `ParallelStreamer.write_row`. Joined branches stay in their own columns."""
        if event == "join":
            text, event = "", "step"
        super().write_row(row, text, event)
        self._draw()

    def _draw(self) -> None:
        if self._live.is_started and time.perf_counter() - self._drawn >= FRAME_SECONDS:
            height = max(min(self.console.height - MARGIN, MAX_HEIGHT), MIN_HEIGHT)
            self._live.update(self.picture(height), refresh=True)
            self._drawn = time.perf_counter()

    def picture(self, height: int | None = None) -> Group:
        """Return the columns with the last `height` lines of each row, as many as fit; None: all lines of all rows."""
        if self.call is None:
            return Group(Text("reading the task ..."))
        fit = max(self.console.width // MIN_WIDTH, 1)
        rows = sorted(self.rows, key=lambda row: self.rows[row][-1].ended) if height is not None else list(self.rows)
        shown = sorted(rows if height is None else rows[:fit])
        tables = [self._table(shown[begin : begin + fit], height) for begin in range(0, len(shown), fit)]
        more = f", and {len(rows) - len(shown)} more rows" if len(rows) > len(shown) else ""
        summary = f"{self.call.record.passes} passes, {self.call.stats.decoded_tokens} tokens{more}"
        return Group(*tables, Text(summary, "bold", no_wrap=True, overflow="ellipsis"))

    def _table(self, rows: Sequence[int], height: int | None) -> Table:
        table = Table(box=ROUNDED, expand=True, border_style="dim")
        for row in rows:
            state = ", done" if self.rows[row][-1].ended else ""
            table.add_column(Text(f"{self._name(row)}{state}", f"bold {COLORS[row % len(COLORS)]}"), ratio=1)
        table.add_row(*(_Tail(self._text(self.rows[row]), height) for row in rows))
        return table

    def _name(self, row: int) -> str:
        assert self.call is not None
        config = self.call.record.config
        prompt, index, _ = config.rows.place(row, self._num_sequences)
        if config.max_rows_per_prompt == 1:
            return config.rows.name(prompt)
        place = f" ({prompt + 1} of {self._num_sequences})" if self._num_sequences > 1 else ""
        return f"{config.rows.name(index)}{place}"

    def _text(self, steps: Sequence[PrintedText]) -> Text:
        """Return the texts of a row. The pass that finished a step precedes it; a cursor follows a text that grows."""
        assert self.call is not None
        marked = self.call.record.config.rows.style.unit == "step"
        text = Text()
        for step in steps:
            text.append(f"{step.passes} " if marked and step.passes else "", "green")
            text.append(printable(step.text.strip(), "\n", " "))
            text.append("\n\n" if step is not steps[-1] else "" if step.ended else "_")
        return text


@dataclass
class _Tail:
    """The last `height` lines of a text, padded to that height; None: all lines."""

    text: Text
    height: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self.text.wrap(console, options.max_width, overflow="fold"))
        if self.height is not None:
            lines = [*lines[-self.height :], *[Text("")] * (self.height - len(lines))]
        yield from lines


def make_console() -> Console:
    """Return a console that prints plain lines unless stdout is a terminal and `NO_COLOR` is unset."""
    is_plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    forced = False if is_plain else None
    return Console(highlight=False, markup=False, emoji=False, force_terminal=forced, force_interactive=forced)
