"""Live view of the rows of a call: columns in a terminal. It needs rich: pip install 'hf_parallel[demo]'."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.cache import BlockCache
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation import ParallelConfig
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.printing import printable

COLORS = ("cyan", "magenta", "yellow", "blue", "green", "red")
FRAME_SECONDS = 0.08  # minimum time between two frames
MAX_ROWS = 12  # rows that are shown at the same time
HIGHLIGHT_PASSES = 8  # forward passes for which a finished step is highlighted
MARK_WIDTH = 5  # of the mark before the text of a step
MIN_WIDTH, MIN_HEIGHT, MAX_HEIGHT = 24, 12, 24  # width of a column; heights of a frame
FRAME_HEIGHT = 5  # lines of a frame besides the text of its rows
ABOVE = 8  # lines of the terminal that are left to earlier output
_clean = partial(printable, kept="\n", replacement=" ")  # the width of a tab depends on its position


@dataclass
class ShownStep:
    """Text of a step; `ended` is the forward pass at which it was finished."""

    text: str = ""
    ended: int | None = None


@dataclass
class ShownRow:
    """Steps of one row: a worker, a branch, an answer."""

    name: str
    steps: list[ShownStep] = field(default_factory=list)
    done: bool = False
    end_reason: str = ""  # why it ended early
    interrupted: bool = False

    @property
    def last(self) -> ShownStep:
        """The last step, which is created if there is none."""
        if not self.steps:
            self.steps.append(ShownStep())
        return self.steps[-1]


class LiveView:
    """Streamer that shows the rows of one prompt: a column per row, as many as fit, unfinished rows first.

    Use it as a context manager. A terminal shows frames below earlier output while rows are generated. At the end, the
    last picture is printed, with the full text of up to 12 rows; other consoles get only this one.

    Parameters
    ----------
    config : ParallelConfig
        The mode and its settings.
    console : rich.console.Console
    tokenizer : PreTrainedTokenizerBase, optional
        Decodes the tokens of modes that stream no text. Without it, their rows are not shown.
    """

    def __init__(
        self, config: ParallelConfig, console: Console, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.config, self.console, self.tokenizer = config, console, tokenizer
        self.interrupted = False  # set by the caller, or on leaving the context with an exception
        self.num_prompts = 1
        num_rows = config.rows_per_prompt * config.traits.streams_text
        self.rows = {row: ShownRow(self._name(row)) for row in range(num_rows)}
        self.passes = self.tokens = self.kv_tokens = 0
        self.completions: list[IncrementalDetokenizer] = []  # of rows that arrive as tokens
        self._counts_puts = config.traits.streams_tokens == "every_pass"  # else `watching` counts passes
        self._end_reasons: dict[int, str] = {}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        self._first: tuple[float, int] | None = None  # time and number of the first tokens
        self._last = 0.0  # time of the last tokens
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        self._draw(now=True)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        self._live.stop()
        self.interrupted |= kind is not None
        for row in self.rows.values():
            row.interrupted, row.done = self.interrupted and not row.done, True
        self.console.print(self.picture())

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Count forward passes and read the size of the cache with a forward hook. Apply a preset of the model."""
        settings = {"parallel_config": self.config}
        self.config = take_parallel_config(model.generation_config, settings) or self.config  # type: ignore[arg-type]

        def measure(module: nn.Module, args: object, kwargs: dict[str, object], output: object) -> None:
            cache = kwargs.get("past_key_values")
            self.passes += not self._counts_puts
            if isinstance(cache, BlockCache):
                self.kv_tokens = cache.kv_bytes // cache.pool.arena.bytes_per_token

        with model.register_forward_hook(measure, with_kwargs=True):
            yield

    @property
    def summary(self) -> str:
        """Figures of the call, in one line."""
        if not self.passes:
            return "reading the task ..."
        since, before = self._first or (self._last, 0)
        speed = (self.tokens - before) / (self._last - since) if self._last > since else 0.0
        tokens = f", {self.tokens} tokens, {speed:.1f} tokens/s" if self.tokens else ""
        return f"{self.passes} passes{tokens}" + (f", {self.kv_tokens} shared KV tokens" if self.kv_tokens else "")

    def begin_call(self, call: GenerationCall) -> None:
        """Receive the prepared call; see `ParallelStreamer`."""
        self._end_reasons = call.record.end_reasons

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompts `int64 [rows, length]`, then new tokens `int64 [rows]`."""
        if value.ndim > 1:
            self._begin(len(value))
            return
        tokens = value.tolist()
        if self._counts_puts:
            count = sum(not row.done for row in self.rows.values()) if self.rows else len(tokens)
            self.passes, self.tokens, self._last = self.passes + 1, self.tokens + count, time.perf_counter()
            self._first = self._first or (self._last, count)
        for row, token in enumerate(tokens[: len(self.completions)]):
            if token in self._special:
                self.write_row(row, "", "end")
            elif not self.rows[row].done:
                self.rows[row].last.text += _clean(self.completions[row].add([token]))
        self._draw()

    def _begin(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        rows = num_prompts * self.config.rows_per_prompt
        if not self.config.traits.streams_text:
            rows *= self.tokenizer is not None
            self.completions = [IncrementalDetokenizer(self.tokenizer) for _ in range(rows)]  # type: ignore[arg-type]
        self.rows = {row: ShownRow(self._name(row)) for row in range(rows)}

    def _name(self, row: int) -> str:
        prompt, index, _ = self.config.rows.place(row, self.num_prompts)
        if self.num_prompts > 1 and self.config.rows_per_prompt == 1 and not self.config.traits.streams_text:
            return self.config.rows.name(prompt)
        name = self.config.rows.name(index)
        return f"{name} ({prompt + 1} of {self.num_prompts})" if self.num_prompts > 1 else name

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text of a row; see `ParallelStreamer`."""
        shown = self.rows.setdefault(row, ShownRow(self._name(row)))
        if event == "begin":
            shown.done = False
            index = self.config.rows.place(row, self.num_prompts).index
            shown.steps.append(ShownStep(_clean(self.config.rows.step_text(index, len(shown.steps) + 1, text))))
        elif event in ("token", "inject"):
            shown.last.text += _clean(text)
            self._draw()
        elif event == "step":
            shown.last.ended = self.passes
        elif event == "join":  # finishes the last step of every row
            for ending in self.rows.values():
                ending.last.ended = self.passes if ending.last.ended is None else ending.last.ended
            shown.steps.append(ShownStep())
        elif event == "end" and not shown.done:
            shown.done, shown.end_reason = True, self._end_reasons.get(row, "")

    def end(self) -> None:
        """End all rows and show the final state."""
        for row in self.rows:
            self.write_row(row, "", "end")
        self._draw(now=True)

    def _draw(self, now: bool = False) -> None:
        """Draw a frame at the height that is left below earlier output, at most one per `FRAME_SECONDS`."""
        if self._live.is_started and (now or time.perf_counter() - self._drawn >= FRAME_SECONDS):
            height = max(min(self.console.height - ABOVE, MAX_HEIGHT), MIN_HEIGHT - 1)
            self._live.update(self.picture(height), refresh=True)
            self._drawn = time.perf_counter()

    def picture(self, height: int | None = None) -> Group:
        """Return the columns and the summary, `height` lines high (None: with the full text of the first rows)."""
        fit = max(self.console.width // MIN_WIDTH, 1)
        rows, shown = list(enumerate(self.rows.values())), MAX_ROWS
        lines = None if height is None else max(height - FRAME_HEIGHT, 1)
        if height is not None:
            done = [(number, row) for number, row in rows if row.done]
            rows = [(number, row) for number, row in rows if not row.done] + done[::-1]
            shown = min(fit, MAX_ROWS)
        hidden, rows = len(rows) - shown, sorted(rows[:shown], key=lambda numbered: numbered[0])
        tables = [self._table(rows[begin : begin + fit], lines) for begin in range(0, len(rows), fit)]
        more = f", and {hidden} more row{'s' * (hidden > 1)}" * (hidden > 0)
        return Group(*tables, Text(self.summary + more, style="bold", no_wrap=True, overflow="ellipsis"))

    def _table(self, rows: Sequence[tuple[int, ShownRow]], height: int | None) -> Table:
        table = Table(box=ROUNDED, expand=True, border_style="dim")
        for number, row in rows:
            color = COLORS[number % len(COLORS)]
            heading = Text.assemble((row.name, f"bold {color}"), (f", {self._state(row)}", color))
            table.add_column(heading, ratio=1)
        table.add_row(*(_Column(row, self.passes, height) for _, row in rows))
        return table

    def _state(self, row: ShownRow) -> str:
        if row.done:
            return "interrupted" if row.interrupted else row.end_reason or "done"
        if not self.passes and not any(step.text for step in row.steps):
            return "reads the task"
        return f"step {len(row.steps)}" if self.config.rows.style.unit == "step" else "writes"


@dataclass
class _Column:
    """A row's steps with their marks; the last `height` lines, padded to that height, or all (None)."""

    row: ShownRow
    now: int
    height: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for step in self.row.steps for line in self._lines(step, console, options.max_width)]
        if self.height is not None:
            lines = [*lines[-self.height :], *[Text("")] * (self.height - len(lines))]
        yield from lines

    def _lines(self, step: ShownStep, console: Console, width: int) -> list[Text]:
        """Return the lines of a step, marked with the pass at which it was finished or with a cursor."""
        finished = step.ended is not None
        check, cursor = ("\u2713", "\u2588") if console.encoding.startswith("utf") else ("+", "_")
        highlighted = finished and not self.row.done and self.now - (step.ended or 0) < HIGHLIGHT_PASSES
        text = Text(step.text.strip(), "green" if highlighted else "" if finished or self.row.done else "bold")
        if not finished:
            text.append(" ..." if self.row.done else cursor, "dim")
        wrapped = text.wrap(console, max(width - MARK_WIDTH, 1), overflow="fold")
        marks = [f"{check}{step.ended}" if finished else "", *[""] * len(wrapped)]
        style = "green" if highlighted else "dim"
        return [Text(f"{mark:<{MARK_WIDTH}}", style) + line for mark, line in zip(marks, wrapped, strict=False)]


def make_console() -> Console:
    """Return a console that prints plain lines unless stdout is a terminal and `NO_COLOR` is unset."""
    is_plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    forced = False if is_plain else None
    return Console(highlight=False, markup=False, emoji=False, force_terminal=forced, force_interactive=forced)
