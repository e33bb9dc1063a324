"""Live view of the rows of a mode: columns in a terminal, lines elsewhere.

The views are streamers for one prompt. They need rich: pip install 'hf_parallel[demo]'.
"""

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
from rich.cells import cell_len
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
    """State of the rows of a call: a `ParallelStreamer` and context manager.

    `tokenizer` decodes the tokens of modes that stream no text; without it their rows are not shown. `interrupted` is
    set by the caller, or on leaving the context with an exception.
    """

    def __init__(
        self, config: ParallelConfig, console: Console, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.config, self.console, self.tokenizer = config, console, tokenizer
        self.interrupted = False
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

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        self.interrupted |= kind is not None

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
        self.changed()

    def _begin(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        rows = num_prompts * self.config.rows_per_prompt
        if not self.config.traits.streams_text:
            self.completions = [
                IncrementalDetokenizer(self.tokenizer) for _ in range(rows) if self.tokenizer is not None
            ]
            rows = len(self.completions)
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
            self.changed()
        elif event in ("step", "join"):  # a join finishes the last step of every row
            for ending in [shown] if event == "step" else self.rows.values():
                if event == "step" or ending.last.ended is None:
                    ending.last.ended = self.passes
                    self.step_ended(ending)
            if event == "join":
                shown.steps.append(ShownStep())
        elif event == "end" and not shown.done:
            shown.done, shown.end_reason = True, self._end_reasons.get(row, "")
            if shown.steps and shown.last.text.strip() and shown.last.ended is None:
                self.step_ended(shown)

    def end(self) -> None:
        """End all rows and show the final state."""
        for row in self.rows:
            self.write_row(row, "", "end")
        self.changed(now=True)

    def changed(self, now: bool = False) -> None:
        """Hook that is called after each forward pass."""

    def step_ended(self, row: ShownRow) -> None:
        """Hook that is called when the last step of a row is finished, and when a row ends with an unfinished step."""


class LiveLines(LiveView):
    """Prints a line per finished step: `Alice | ...`."""

    def step_ended(self, row: ShownRow) -> None:
        """Print the step, unless it was printed when its row ended."""
        ended = row.last.ended
        if ended is None or not row.done:
            self._print(row, f"(step {len(row.steps)}, pass {ended})" if ended else f"({row.end_reason or 'end'})")

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        """Print the unfinished steps of an interrupted call."""
        super().__exit__(kind, *exception)
        for row in self.rows.values() if self.interrupted else ():
            if not row.done and row.last.ended is None and row.last.text.strip():
                self._print(row, "(interrupted)")

    def _print(self, row: ShownRow, mark: str) -> None:
        lines = [line for line in row.last.text.strip().splitlines() if line.strip()] or [""]
        for line in (*lines[:-1], f"{lines[-1]}  {mark}"):
            self.console.print(Text(f"{self._margin(row)}{line}"), soft_wrap=True)

    def _margin(self, row: ShownRow) -> str:
        return f"{row.name:<{max(len(other.name) for other in self.rows.values())}} | "


class LiveFrames(LiveView):
    """Draws frames below earlier output while rows are generated, and removes the last one on exit."""

    def __init__(
        self, config: ParallelConfig, console: Console, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(config, console, tokenizer)
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        self.changed(now=True)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        self._live.stop()
        super().__exit__(kind, *exception)

    def changed(self, now: bool = False) -> None:
        """Draw a frame, at most one per `FRAME_SECONDS`."""
        if now or time.perf_counter() - self._drawn >= FRAME_SECONDS:
            self._live.update(self.frame(), refresh=True)
            self._drawn = time.perf_counter()

    def frame(self) -> Group:
        """Return the current frame, no higher than the terminal."""
        raise NotImplementedError

    def _summary_line(self, hidden: int) -> Text:
        """Return the summary, with the number of rows that are not shown."""
        more = f", and {hidden} more row{'s' * (hidden > 1)}" * (hidden > 0)
        return Text(self.summary + more, style="bold", no_wrap=True, overflow="ellipsis")


class LiveTails(LiveFrames, LiveLines):
    """Prints a line per finished step and shows the end of each unfinished step below, one line each."""

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        """Print the summary."""
        super().__exit__(kind, *exception)
        self.console.print(Text(self.summary, "bold"), soft_wrap=True)

    def frame(self) -> Group:
        """Return the ends of the first unfinished rows, and the summary."""
        active = [row for row in self.rows.values() if not row.done]
        rows = active[: min(max(self.console.height - 2, 1), MAX_ROWS)]
        tails = [Text(self._tail(row), "dim", no_wrap=True, overflow="crop") for row in rows]
        return Group(*tails, self._summary_line(len(active) - len(rows)))

    def _tail(self, row: ShownRow) -> str:
        margin = self._margin(row)
        width = max(self.console.width - cell_len(margin), 1)
        text = "" if not row.steps or row.last.ended is not None else " ".join(row.last.text.split())[-width:]
        while cell_len(text) > width:  # some characters are two cells wide
            text = text[1:]
        return margin + text


class LiveColumns(LiveFrames):
    """Shows a column per row: in a frame as many as fit, unfinished rows first; on exit `MAX_ROWS`, at full height."""

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        super().__exit__(kind, *exception)
        for row in self.rows.values():
            row.interrupted, row.done = self.interrupted and not row.done, True
        self.console.print(self.picture())

    def frame(self) -> Group:
        """Return the picture at the height that is left below earlier output."""
        return self.picture(max(min(self.console.height - ABOVE, MAX_HEIGHT), MIN_HEIGHT - 1))

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
        return Group(*tables, self._summary_line(hidden))

    def _table(self, rows: Sequence[tuple[int, ShownRow]], height: int | None) -> Table:
        table = Table(box=ROUNDED, expand=True, border_style="dim")
        for number, row in rows:
            state = self._state(row)
            color = COLORS[number % len(COLORS)]
            table.add_column(Text.assemble((row.name, f"bold {color}"), (f", {state}", color)), ratio=1)
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


def live_view(config: ParallelConfig, console: Console, tokenizer: PreTrainedTokenizerBase | None = None) -> LiveView:
    """Return the view that suits a console; see `LiveView` for the parameters.

    A terminal shows columns if all rows of a merged answer fit side by side, or two rows of separate answers. A smaller
    one prints finished steps as lines and shows the ends of unfinished ones below. Other consoles get only the lines.
    """
    columns = config.rows_per_prompt if config.traits.merges_rows else 2
    if not console.is_interactive:
        return LiveLines(config, console, tokenizer)
    fits = console.width >= MIN_WIDTH * columns and console.height >= MIN_HEIGHT
    return (LiveColumns if fits else LiveTails)(config, console, tokenizer)


def make_console() -> Console:
    """Return a console that prints plain lines unless stdout is a terminal and `NO_COLOR` is unset."""
    is_plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    forced = False if is_plain else None
    return Console(highlight=False, markup=False, emoji=False, force_terminal=forced, force_interactive=forced)
