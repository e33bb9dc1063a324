"""Timing in rounds: each round runs every method once, so that machine noise affects all of them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from .measure import StepClock

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


def run_rounds(ways: Mapping[str, Way], rounds: int) -> dict[str, Times]:
    """Run every method once as a warm-up, then `rounds` times."""
    times = {name: Times() for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            print(f"{name}, round {number} of {rounds}")
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


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result
