"""What rows write, workers or branches, shown while they write it: columns in a terminal, lines elsewhere.

Streamers for a mode, one prompt at a time. They need rich: pip install 'hf_parallel[demo]'.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from hf_parallel.cache import BlockCache
from hf_parallel.cli.printing import printable
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation import ParallelConfig
from hf_parallel.generation.modes.hogwild.config import HogwildConfig

COLORS = ("cyan", "magenta", "yellow", "blue", "green", "red")
FRAME_SECONDS = 0.08
"""Least time between two pictures."""
FRESH_PASSES = 8
"""Forward passes for which a step that has just moved is highlighted."""
MARK_WIDTH = 5
"""Columns before the text of a step."""
MIN_WIDTH, MIN_HEIGHT, MAX_HEIGHT = 24, 12, 24
"""Columns per row that writes and lines of the terminal that the picture needs, and lines that it takes at most."""
FRAME_HEIGHT = 5
"""Lines of the picture that are not the text of its rows."""
ABOVE = 8
"""Lines of the terminal that are left to what was printed before the picture."""
_PUT_BY_PASS = ("hogwild", "resample", "shared_prefix")
"""Modes that hand each pass's tokens to a streamer; others do when tokens are final."""
_clean = partial(printable, kept="\n", instead=" ")
"""A text for columns, in which a tab has no certain width."""


@dataclass
class ShownStep:
    """A text as it is shown; `ended` is the forward pass at which it moved into what all rows have in common."""

    text: str = ""
    ended: int | None = None


@dataclass
class ShownRow:
    """One row's column: the steps of a worker, a branch, an answer."""

    name: str
    steps: list[ShownStep] = field(default_factory=list)
    done: bool = False
    interrupted: bool = False

    @property
    def last(self) -> ShownStep:
        """What it is writing; begun here, if nothing has been."""
        if not self.steps:
            self.steps.append(ShownStep())
        return self.steps[-1]


class LiveView:
    """Keeps account of what the rows of a mode write. A context manager, and a `ParallelStreamer`.

    Parameters
    ----------
    config : ParallelConfig
        That of the call or the session: what its rows are called follows from it.
    console : rich.console.Console
    tokenizer : optional
        Gives text to the tokens of modes that write none themselves (`shared_prefix`, `resample`); without it their
        rows are not shown.

    Attributes
    ----------
    interrupted : bool
        Whether the call ended before its rows did: set by who caught what ended it, or by leaving with an exception.
    """

    def __init__(self, config: ParallelConfig, console: Console, tokenizer: Any = None) -> None:
        self.config, self.console, self.tokenizer = config, console, tokenizer
        self.interrupted = False
        names = config.names if isinstance(config, HogwildConfig) else []
        self.rows = {number: ShownRow(name) for number, name in enumerate(names)}
        self.passes = self.tokens = self.kv_tokens = 0
        self.written: list[IncrementalDetokenizer] = []  # of rows that come as tokens
        self._first: tuple[float, int] | None = None  # time of the first tokens, and how many they were
        self._last = 0.0

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        self.interrupted |= kind is not None

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Read off each forward pass that there was one, and how many tokens its cache holds."""

        def measure(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            cache = kwargs.get("past_key_values")
            self.passes += self.config.mode not in _PUT_BY_PASS
            if isinstance(cache, BlockCache):
                self.kv_tokens = cache.kv_bytes // cache.arena.bytes_per_token

        handle = model.register_forward_hook(measure, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @property
    def seconds(self) -> float:
        """Since the first tokens."""
        return 0.0 if self._first is None else self._last - self._first[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows, headers not counted."""
        return (self.tokens - self._first[1]) / self.seconds if self._first and self.seconds else 0.0

    @property
    def summary(self) -> str:
        """What was done so far, in a line."""
        if not self.passes:
            return "reading the task ..."
        parts = [f"{self.passes} passes"]
        if self.tokens:
            parts += [f"{self.tokens} tokens", f"{self.tokens_per_second:.1f} tokens/s"]
        if self.kv_tokens:
            parts.append(f"{self.kv_tokens} shared KV tokens")
        return ", ".join(parts)

    def put(self, value: Any) -> None:
        """Take the prompts `[rows, length]`, then each pass's tokens `[rows]`."""
        tokens = value.tolist()
        if self.config.mode in ("shared_prefix", "resample"):
            self._put_tokens(tokens, value.ndim > 1)
        elif self.config.mode in _PUT_BY_PASS and value.ndim == 1:
            self._count(sum(not row.done for row in self.rows.values()))
            self.changed()

    def _put_tokens(self, tokens: list[Any], are_prompts: bool) -> None:
        if are_prompts:
            self.written = [IncrementalDetokenizer(self.tokenizer) for _ in tokens if self.tokenizer is not None]
            self.rows = {number: ShownRow(self.config.row_name(number)) for number in range(len(self.written))}
            self._special = set(getattr(self.tokenizer, "all_special_ids", ()))
            return
        self._count(sum(not row.done for row in self.rows.values()) if self.rows else len(tokens))
        for (number, row), text, token in zip(self.rows.items(), self.written, tokens, strict=False):
            if token in self._special:
                self.write_row(number, "", "end")
            elif not row.done:
                row.last.text += _clean(text.add([token]))
        self.changed()

    def _count(self, tokens: int) -> None:
        """One forward pass more, which gave so many tokens."""
        self.passes, self.tokens, self._last = self.passes + 1, self.tokens + tokens, time.perf_counter()
        self._first = self._first or (self._last, tokens)

    def write_row(self, row: int, text: str, event: str) -> None:
        """Take what a row wrote; events as in `ParallelStreamer`."""
        if row not in self.rows:
            self.rows[row] = ShownRow(self.config.row_name(row))
        shown = self.rows[row]
        if event == "begin":
            shown.done = False
            shown.steps.append(ShownStep(_clean(self._without_prefix(shown, text))))
        elif event in ("token", "inject"):
            shown.last.text += _clean(text)
            self.changed()
        elif event == "step":
            self._end_step(shown)
        elif event == "join":  # what the branches wrote is part of the answer now
            for other in self.rows.values():
                if other.last.ended is None:
                    self._end_step(other)
            shown.steps.append(ShownStep())
        elif event == "end" and not shown.done:
            shown.done = True
            if shown.steps and shown.last.text.strip() and shown.last.ended is None:
                self.step_ended(shown, shown.last)

    def _without_prefix(self, row: ShownRow, text: str) -> str:
        if not isinstance(self.config, HogwildConfig):
            return text
        return text.removeprefix(self.config.step_prefix.format(name=row.name, step=len(row.steps) + 1))

    def _end_step(self, row: ShownRow) -> None:
        row.last.ended = self.passes
        self.step_ended(row, row.last)

    def end(self) -> None:
        """Let all rows end, and show the last state."""
        for row in self.rows:
            self.write_row(row, "", "end")
        self.changed(now=True)

    def changed(self, now: bool = False) -> None:
        """Called after each forward pass."""

    def step_ended(self, row: ShownRow, step: ShownStep) -> None:
        """Called when a step has moved into what all have in common, and with what a row wrote last."""


class LiveLines(LiveView):
    """A line per step that has ended: `Alice | ...`."""

    def step_ended(self, row: ShownRow, step: ShownStep) -> None:
        """Print the step; what a branch wrote was printed when it ended."""
        if row.done and step.ended is not None:
            return
        self._print(row, f"(step {len(row.steps)}, pass {step.ended})" if step.ended else "(end)")

    def __exit__(self, *exception: Any) -> None:
        """Print what rows had begun, if they were interrupted."""
        super().__exit__(*exception)
        for row in self.rows.values() if self.interrupted else ():
            if not row.done and row.last.ended is None and row.last.text.strip():
                self._print(row, "(interrupted)")

    def _print(self, row: ShownRow, mark: str) -> None:
        """Print a row's last step."""
        lines = [line for line in row.last.text.strip().splitlines() if line.strip()] or [""]
        for line in (*lines[:-1], f"{lines[-1]}  {mark}"):
            self.console.print(Text(f"{self._margin(row)}{line}"), soft_wrap=True)

    def _margin(self, row: ShownRow) -> str:
        """What a line of a row begins with."""
        width = max(len(other.name) for other in self.rows.values())
        return f"{row.name:<{width}} | "


class LivePicture(LiveView):
    """A picture that is drawn again and again while rows write, below what was printed before, and then taken away."""

    def __init__(self, config: ParallelConfig, console: Console, tokenizer: Any = None) -> None:
        super().__init__(config, console, tokenizer)
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._shown = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        self._draw()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.stop()
        super().__exit__(*exception)

    def changed(self, now: bool = False) -> None:
        """Draw, unless that was done a moment ago."""
        if now or time.perf_counter() - self._shown >= FRAME_SECONDS:
            self._draw()

    def frame(self) -> Group:
        """The picture as it is now, no higher than the terminal."""
        raise NotImplementedError

    def _draw(self) -> None:
        self._live.update(self.frame(), refresh=True)
        self._shown = time.perf_counter()


class LiveTails(LivePicture, LiveLines):
    """A line per step that has ended, and below them for each row the end of what it is writing, one line each."""

    def __exit__(self, *exception: Any) -> None:
        """Leave the lines and the account."""
        super().__exit__(*exception)
        self.console.print(Text(self.summary, "bold"), soft_wrap=True)

    def frame(self) -> Group:
        """Rows that still write, as many as there is room for, and the account."""
        writing = [row for row in self.rows.values() if not row.done][: max(self.console.height - 2, 1)]
        tails = [Text(self._tail(row), "dim", no_wrap=True, overflow="crop") for row in writing]
        return Group(*tails, Text(self.summary, style="bold", no_wrap=True, overflow="ellipsis"))

    def _tail(self, row: ShownRow) -> str:
        margin = self._margin(row)
        room = max(self.console.width - cell_len(margin), 1)
        text = "" if not row.steps or row.last.ended is not None else " ".join(row.last.text.split())[-room:]
        while cell_len(text) > room:  # characters of two columns
            text = text[1:]
        return margin + text


class LiveColumns(LivePicture):
    """A column per row that fills token by token; steps are marked as they move into what all have in common.

    While rows write, the picture fits below what was printed before, and shows as many of them as there is room for,
    those that still write first. What stays in the end is all of it.
    """

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for row in self.rows.values():
            row.interrupted, row.done = self.interrupted and not row.done, True
        self.console.print(self.picture())

    def frame(self) -> Group:
        """The picture at the height that leaves room for what was printed before."""
        return self.picture(max(min(self.console.height - ABOVE, MAX_HEIGHT), MIN_HEIGHT - 1))

    def picture(self, height: int | None = None) -> Group:
        """The columns and below them the account, `height` lines high (None: as high as it takes)."""
        room = max(self.console.width // MIN_WIDTH, 1)
        rows = list(enumerate(self.rows.values()))
        account = self.summary
        if height is None:
            bands = [rows[i : i + room] for i in range(0, len(rows), room)]
        else:
            writing = [number for number, row in rows if not row.done]
            done = [number for number, row in rows if row.done]
            kept = {*writing[:room], *done[len(done) - max(room - len(writing), 0) :]}
            bands = [[(number, row) for number, row in rows if number in kept]]
            account += f", {len(rows) - len(kept)} more rows" * (len(kept) < len(rows))
        lines = None if height is None else max(height - FRAME_HEIGHT, 1)
        tables = [self._table(band, lines) for band in bands if band]
        return Group(*tables, Text(account, style="bold", no_wrap=True, overflow="ellipsis"))

    def _table(self, rows: Sequence[tuple[int, ShownRow]], height: int | None) -> Table:
        table = Table(box=ROUNDED, expand=True, border_style="dim")
        for number, row in rows:
            state = ("interrupted" if row.interrupted else "done") if row.done else self._state(row)
            color = COLORS[number % len(COLORS)]
            table.add_column(Text.assemble((row.name, f"bold {color}"), (f", {state}", color)), ratio=1)
        table.add_row(*(Column(row, self.passes, height) for _, row in rows))
        return table

    def _state(self, row: ShownRow) -> str:
        if not self.passes and not any(step.text for step in row.steps):
            return "reads the task"
        return f"step {len(row.steps)}" if isinstance(self.config, HogwildConfig) else "writes"


class Column:
    """A row's steps, each with its mark: the pass at which it moved to the others', or that it is being written.

    With a `height` its last lines, padded to that height.
    """

    def __init__(self, row: ShownRow, now: int, height: int | None) -> None:
        self.row, self.now, self.height = row, now, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for step in self.row.steps for line in self._lines(step, console, options.max_width)]
        if self.height is not None:
            lines = [*lines[-self.height :], *[Text("")] * (self.height - len(lines))]
        yield from lines

    def _lines(self, step: ShownStep, console: Console, width: int) -> list[Text]:
        moved = step.ended is not None
        check, cursor = ("\u2713", "\u2588") if console.encoding.startswith("utf") else ("+", "_")
        fresh = moved and not self.row.done and self.now - (step.ended or 0) < FRESH_PASSES
        style = "green" if fresh else "" if moved or self.row.done else "bold"
        mark = f"{check}{step.ended}" if moved else ""
        text = Text(step.text.strip(), style)
        if not moved:
            text.append(" ..." if self.row.done else cursor, "dim")
        wrapped = text.wrap(console, max(width - MARK_WIDTH, 1), overflow="fold")
        margins = [Text(f"{mark:<{MARK_WIDTH}}", "green" if fresh else "dim"), *[Text(" " * MARK_WIDTH)] * len(wrapped)]
        return [margin + line for margin, line in zip(margins, wrapped, strict=False)]


def live_view(config: ParallelConfig, console: Console, tokenizer: Any = None) -> LiveView:
    """Columns where the console is a terminal with room for them, lines elsewhere; see `LiveView`.

    Lines are printed when steps end; in a terminal the end of what rows are writing is shown below them.

    Workers need a column each; of other rows two at least must fit.
    """
    columns = config.num_workers if isinstance(config, HogwildConfig) else 2
    room = console.width >= MIN_WIDTH * columns and console.height >= MIN_HEIGHT
    if not console.is_interactive:
        return LiveLines(config, console, tokenizer)
    return (LiveColumns if room else LiveTails)(config, console, tokenizer)
