"""What hogwild workers write, shown while they write it: columns in a terminal, lines elsewhere.

Streamers for `generation_mode="hogwild"`, one problem at a time. They need rich: pip install 'hf_parallel[demo]'.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from .cache import BlockCache
from .generation import HogwildConfig

COLORS = ("cyan", "magenta", "yellow", "blue", "green", "red")
FRAME_SECONDS = 0.08
"""Least time between two pictures."""
FRESH_PASSES = 8
"""Forward passes for which a step that has just moved is highlighted."""
MARK_WIDTH = 5
"""Columns before the text of a step."""
MIN_WIDTH, MIN_HEIGHT, MAX_HEIGHT = 24, 12, 24
"""Columns per worker and rows of the terminal that the picture needs, and rows that it takes at most."""
FRAME_HEIGHT = 5
"""Rows of the picture that are not the workers' text."""
ABOVE = 8
"""Rows of the terminal that are left to what was printed before the picture."""


@dataclass
class ShownStep:
    """A step as it is shown; `ended` is the forward pass at which it moved into the history."""

    text: str = ""
    ended: int | None = None


@dataclass
class ShownWorker:
    """One worker's column."""

    name: str
    steps: list[ShownStep] = field(default_factory=list)
    done: bool = False


class WorkerView:
    """Keeps account of what the workers write. A context manager, and a `ParallelStreamer`.

    Parameters
    ----------
    config : HogwildConfig
        That of the call: names and step prefix are read off it.
    console : rich.console.Console
    """

    def __init__(self, config: HogwildConfig, console: Console) -> None:
        self.config, self.console = config, console
        self.workers = [ShownWorker(name) for name in config.names]
        self.passes = self.tokens = self.kv_tokens = 0
        self._first: tuple[float, int] | None = None  # time of the first tokens, and how many they were
        self._last = 0.0

    def __enter__(self) -> WorkerView:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Read off the cache of each forward pass how many tokens it holds."""

        def measure(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            cache = kwargs.get("past_key_values")
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
        """Tokens of all workers, headers not counted."""
        return (self.tokens - self._first[1]) / self.seconds if self._first and self.seconds else 0.0

    @property
    def summary(self) -> str:
        """What was done so far, in a line."""
        if not self.passes:
            return "reading the task ..."
        parts = [f"{self.passes} passes", f"{self.tokens} tokens", f"{self.tokens_per_second:.1f} tokens/s"]
        if self.kv_tokens:
            parts.append(f"{self.kv_tokens} shared KV tokens")
        return ", ".join(parts)

    def put(self, value: Any) -> None:
        """Take the prompt `[1, length]`, then each pass's tokens `[workers]`."""
        if value.ndim > 1:
            return
        new = sum(not worker.done for worker in self.workers)
        self.passes, self.tokens, self._last = self.passes + 1, self.tokens + new, time.perf_counter()
        self._first = self._first or (self._last, new)
        self.changed()

    def write_row(self, row: int, text: str, event: str) -> None:
        """Take what a worker wrote; events as in `ParallelStreamer`."""
        worker = self.workers[row % len(self.workers)]
        if event == "begin":
            prefix = self.config.step_prefix.format(name=worker.name, step=len(worker.steps) + 1)
            worker.steps.append(ShownStep(_printable(text.removeprefix(prefix))))
        elif event == "token":
            worker.steps[-1].text += _printable(text)
        elif event == "step":
            worker.steps[-1].ended = self.passes
            self.step_ended(worker, worker.steps[-1])
        elif event == "end" and not worker.done:
            worker.done = True
            if worker.steps[-1].text.strip() and worker.steps[-1].ended is None:
                self.step_ended(worker, worker.steps[-1])

    def end(self) -> None:
        """Show the last state."""
        self.changed(now=True)

    def changed(self, now: bool = False) -> None:
        """Called after each forward pass."""

    def step_ended(self, worker: ShownWorker, step: ShownStep) -> None:
        """Called when a step has moved into the history, and with what a worker wrote last."""


class WorkerLines(WorkerView):
    """A line per step that has ended: `Alice | ...`."""

    def step_ended(self, worker: ShownWorker, step: ShownStep) -> None:
        """Print the step."""
        width = max(len(other.name) for other in self.workers)
        mark = f"(step {len(worker.steps)}, pass {step.ended})" if step.ended else "(end)"
        lines = [line for line in step.text.strip().splitlines() if line.strip()] or [""]
        for line in (*lines[:-1], f"{lines[-1]}  {mark}"):
            self.console.print(Text(f"{worker.name:<{width}} | {line}"), soft_wrap=True)


class WorkerColumns(WorkerView):
    """A column per worker that fills token by token; steps are marked as they move into the common history.

    While the workers write, the picture fits below what was printed before. What stays in the end is all of it.
    """

    def __init__(self, config: HogwildConfig, console: Console) -> None:
        super().__init__(config, console)
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._shown = 0.0

    def __enter__(self) -> WorkerColumns:
        self._live.start()
        self._draw()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        for worker in self.workers:
            worker.done = True
        self.console.print(self.picture())

    def changed(self, now: bool = False) -> None:
        """Draw, unless that was done a moment ago."""
        if now or time.perf_counter() - self._shown >= FRAME_SECONDS:
            self._draw()

    def picture(self, height: int | None = None) -> Group:
        """The columns and below them the account, `height` rows high (None: as high as it takes)."""
        table = Table(box=ROUNDED, expand=True, border_style="dim")
        cells = []
        for number, worker in enumerate(self.workers):
            state = "done" if worker.done else f"step {len(worker.steps)}" if self.passes else "reads the task"
            color = COLORS[number % len(COLORS)]
            table.add_column(Text.assemble((worker.name, f"bold {color}"), (f", {state}", color)), ratio=1)
            cells.append(Column(worker, self.passes, None if height is None else max(height - FRAME_HEIGHT, 1)))
        table.add_row(*cells)
        return Group(table, Text(self.summary, style="bold", no_wrap=True, overflow="ellipsis"))

    def _draw(self) -> None:
        height = max(min(self.console.height - ABOVE, MAX_HEIGHT), MIN_HEIGHT - 1)
        self._live.update(self.picture(height), refresh=True)
        self._shown = time.perf_counter()


class Column:
    """A worker's steps, each with its mark: the pass at which it moved into the history, or that it is being written.

    With a `height` its last lines, padded to that height.
    """

    def __init__(self, worker: ShownWorker, now: int, height: int | None) -> None:
        self.worker, self.now, self.height = worker, now, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for step in self.worker.steps for line in self._lines(step, console, options.max_width)]
        if self.height is not None:
            lines = [*lines[-self.height :], *[Text("")] * (self.height - len(lines))]
        yield from lines

    def _lines(self, step: ShownStep, console: Console, width: int) -> list[Text]:
        moved = step.ended is not None
        check, cursor = ("\u2713", "\u2588") if console.encoding.startswith("utf") else ("+", "_")
        fresh = moved and not self.worker.done and self.now - (step.ended or 0) < FRESH_PASSES
        style = "green" if fresh else "" if moved or self.worker.done else "bold"
        mark = f"{check}{step.ended}" if moved else ""
        text = Text(step.text.strip(), style)
        if not moved:
            text.append(" ..." if self.worker.done else cursor, "dim")
        wrapped = text.wrap(console, max(width - MARK_WIDTH, 1), overflow="fold")
        margins = [Text(f"{mark:<{MARK_WIDTH}}", "green" if fresh else "dim"), *[Text(" " * MARK_WIDTH)] * len(wrapped)]
        return [margin + line for margin, line in zip(margins, wrapped, strict=False)]


def worker_view(config: HogwildConfig, console: Console) -> WorkerView:
    """Columns where the console is a terminal with room for them, lines elsewhere."""
    room = console.width >= MIN_WIDTH * config.num_workers and console.height >= MIN_HEIGHT
    return (WorkerColumns if console.is_interactive and room else WorkerLines)(config, console)


def _printable(text: str) -> str:
    """A text without what a terminal would take for commands."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)
