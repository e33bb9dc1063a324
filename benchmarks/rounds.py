"""Timing in rounds: each round runs every method once, so that machine noise affects all of them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from transformers import DynamicCache

from hf_parallel.cli.measure import StepClock

Way = Callable[[StepClock], object]
"""Calls `generate` with the clock as its streamer."""


@dataclass
class Times:
    """Seconds of one method: the prefill of each round, and the steps of each round."""

    prefill: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median of all steps, in seconds."""
        return statistics.median(second for steps in self.steps for second in steps)

    @property
    def rounded_steps(self) -> list[list[float]]:
        """Steps rounded to microseconds, for a report."""
        return [[round(second, 6) for second in steps] for steps in self.steps]


def run_rounds(ways: Mapping[str, Way], rounds: int, bar: Bar) -> dict[str, Times]:
    """Run every method once as a warm-up, then `rounds` times."""
    times = {name: Times() for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            bar.next(f"{name}, round {number} of {rounds}")
            clock = StepClock()
            way(clock)
            if number:
                times[name].prefill.append(clock.prefill_seconds)
                times[name].steps.append(clock.step_seconds)
    return times


def prefill_ratio(ours: Times, other: Times) -> float:
    """Return the median over the rounds of the ratio of prefill seconds."""
    return statistics.median(a / b for a, b in zip(ours.prefill, other.prefill, strict=True))


def step_ratio(ours: Times, other: Times) -> float:
    """Return the median over the rounds of the ratio of median steps."""
    pairs = zip(ours.steps, other.steps, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


class PrefilledCache:
    """KV cache of a prompt without its last token, copied for each row: the remedy that transformers documents.

    Attributes
    ----------
    copying : list of float
        Seconds of each copy.
    """

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.copying: list[float] = []
        self.sequences = ids
        self.kv_bytes = 0
        self._row = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=self._row, use_cache=True, logits_to_keep=1)

    def repeated(self, rows: int) -> DynamicCache:
        """Return a copy for `rows` rows."""
        began = time.perf_counter()
        cache = copy.deepcopy(self._row)
        cache.batch_repeat_interleave(rows)
        self.copying.append(time.perf_counter() - began)
        return cache


class Bar:
    """Progress bar that draws between calls only, so as not to disturb timings. Prints lines if not interactive."""

    def __init__(self, console: Console, calls: int) -> None:
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_interactive)
        self._task = self._bar.add_task("", total=calls)
        self._console, self._calls, self._count = console, calls, 0

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.update(self._task, description="")
        self._bar.stop()

    def next(self, what: str) -> None:
        """Announce the next call."""
        self._bar.update(self._task, description=what, completed=self._count, refresh=True)
        self._count += 1
        if self._bar.disable:
            self._console.print(f"{self._count}/{self._calls} {what}", markup=False)


def compare(ratios: Mapping[str, float], limits: Iterable[tuple[str, str, float, str]]) -> list[dict[str, Any]]:
    """Compare ratios with their limits: name, "at least" or "at most", limit, and description of each."""
    found = []
    for name, direction, limit, words in limits:
        if name in ratios:
            met = ratios[name] >= limit if direction == "at least" else ratios[name] <= limit
            found.append({"what": words, "value": ratios[name], direction.replace(" ", "_"): limit, "met": met})
    return found


def targets_table(targets: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of the results of `compare`."""
    table = Table("", "", "limit", "", title="targets", title_justify="left")
    for target in targets:
        limit = f"at least {target['at_least']:g}" if "at_least" in target else f"at most {target['at_most']:g}"
        table.add_row(target["what"], f"{target['value']:.3f}", limit, "met" if target["met"] else "MISSED")
    return table
