"""Targets of the GPU benchmark, compared with the measured figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from .graphs import TOLERANCE
from .model import ModelStage

DIFFERENCE = 0.02
"""Tolerance of bf16 outputs: several times the rounding error, a fraction of the error caused by a missing block."""

Values = Iterator[float | None]
Cases = list[dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """Target: all values of `find` are at most (or at least) `limit`.

    Parameters
    ----------
    what : str
    stage : str
        Stage whose cases are passed to `find`.
    find : callable
        Yields one value per relevant case, None if it was not measured.
    limit : float
    at_least : bool
        Whether the limit is a lower one.
    """

    what: str
    stage: str
    find: Callable[[Cases], Values]
    limit: float
    at_least: bool = False

    def judge(self, stages: dict[str, Any]) -> dict[str, Any]:
        """Return the worst value, the number of values, and the status: met, missed or not (fully) measured."""
        values = list(self.find(stages.get(self.stage, {}).get("cases", [])))
        measured = [value for value in values if value is not None]
        worst = (min if self.at_least else max)(measured, default=None)
        if worst is not None and not self._keeps(worst):
            status = "missed"
        else:
            status = "met" if measured and len(measured) == len(values) else "not measured"
        return {
            "what": self.what,
            "worst": worst if worst is None or math.isfinite(worst) else None,
            "limit": self.limit,
            "at_least": self.at_least,
            "measured": len(measured),
            "of": len(values),
            "status": status,
        }

    def _keeps(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Acceptance:
    """All targets.

    Parameters
    ----------
    model : ModelStage
        Stage whose sizes appear in the targets.
    large_kv_bytes : int
        Minimum size of the unique keys and values for the target of attention.
    long_tokens : int
        Minimum number of tokens for the target of Hogwild! attention.
    workers : int
        Number of workers in the targets.
    """

    model: ModelStage
    large_kv_bytes: int
    long_tokens: int
    workers: int

    def table(self, stages: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all targets with their status."""
        return [line.judge(stages) for line in self._lines()]

    def _lines(self) -> list[Line]:
        w, rows, prefixes = self.workers, max(self.model.rows), sorted(self.model.prefixes)
        short, long, name = prefixes[0], prefixes[-1], self.model.models[0]
        few, compared = self.model.few_rows, max(self.model.compared_rows)
        return [
            Line("kernels, bf16 and fp16: largest error", "correctness", _errors("bfloat16", "float16"), 2e-2),
            Line("kernels, fp32: largest error", "correctness", _errors("float32"), 1e-5),
            Line("kernels: error relative to FlashAttention's", "correctness", _figure("error_by_flash"), 1.5),
            Line("replayed decode steps: largest error of a logit", "graphs", _graph_errors, TOLERANCE),
            Line("attention: difference from FlashAttention's output", "attention", _difference, DIFFERENCE),
            *(
                Line(
                    f"attention, bound by {bound}: fraction of the hardware limit, large KV",
                    "attention",
                    partial(self._large_kv, bound),
                    limit,
                    at_least=True,
                )
                for bound, limit in (("memory", 0.85), ("compute", 0.70))
            ),
            Line("attention: time relative to FlashAttention", "attention", _versus("flash"), 1.0),
            Line("attention: time relative to FlashInfer's cascade", "attention", _versus("flashinfer"), 1.0),
            Line(
                f"hogwild, {w} workers: attention relative to FlashAttention", "hogwild", self._hogwild_attention, 1.15
            ),
            Line("hogwild: set-up of a step, us", "hogwild", _set_up, 50.0),
            Line(f"model, {rows} rows: throughput lost from prefix {short} to {long}", "model", self._loss, 0.15),
            Line(
                f"model, {rows} rows over {self._middle}: throughput relative to no attention",
                "model",
                self._by_no_attention,
                0.85,
                at_least=True,
            ),
            Line(
                f"model, hogwild: tokens/s of {w} workers relative to 1",
                "model",
                self._scaling,
                0.95 * w,
                at_least=True,
            ),
            Line(f"model, {min(few)} to {max(few)} rows: step relative to weight reads", "model", self._few_rows, 1.4),
            Line(
                f"{name}, {compared} rows over {short}: step, ms",
                "model",
                lambda cases: iter([_step(cases, name, "shared_prefix", compared, short)] if cases else []),
                7.0,
            ),
            Line(
                f"{name}, {rows} rows over {short}: tokens/s",
                "model",
                lambda cases: iter([_rate(cases, name, "shared_prefix", rows, short)] if cases else []),
                32_000,
                at_least=True,
            ),
            Line(
                f"{name}, {few[0]} row: speed relative to generate with a compiled static cache",
                "model",
                self._by_static_cache,
                1.5,
                at_least=True,
            ),
            Line(
                f"{name}, largest size of `unshared`: its step relative to shared_prefix's",
                "model",
                self._by_unshared,
                4.0,
                at_least=True,
            ),
            Line("prefill: time relative to one forward pass", "prefill", _figure("by_plain"), 1.02),
            Line("compiled decode: start of a second process, s", "start", _second_start, 5.0),
            Line("sampling, most rows: ms more than greedy", "sampling", _figure("ms_over_greedy"), 2.8),
        ]

    def _large_kv(self, bound: str, cases: Cases) -> Values:
        """Yield fractions of the limit; a case that was not measured counts for both limits."""
        for case in cases:
            if case["kv_bytes"] >= self.large_kv_bytes and case.get("bound", bound) == bound:
                yield case.get("of_limit")

    @property
    def _middle(self) -> int:
        """Length of the prefix between the shortest and the longest one; the longest of two."""
        return sorted(self.model.prefixes)[len(self.model.prefixes) // 2]

    def _hogwild_attention(self, cases: Cases) -> Values:
        for case in cases:
            if case["workers"] == self.workers and case["tokens"] >= self.long_tokens:
                yield case.get("by_flash")

    def _loss(self, cases: Cases) -> Values:
        rows, prefixes = max(self.model.rows), self.model.prefixes
        for name in self._names(cases):
            short, long = (
                _rate(cases, name, "shared_prefix", rows, prefix) for prefix in (min(prefixes), max(prefixes))
            )
            yield None if short is None or long is None else 1 - long / short

    def _by_no_attention(self, cases: Cases) -> Values:
        for name in self._names(cases):
            ours, most = (
                _rate(cases, name, way, max(self.model.rows), self._middle) for way in ("shared_prefix", "no_attention")
            )
            yield None if ours is None or most is None else ours / most

    def _by_static_cache(self, cases: Cases) -> Values:
        for name in self._names(cases)[:1]:
            sizes = self.model.few_rows[0], self.model.prefixes[0]
            ours, other = (_rate(cases, name, way, *sizes) for way in ("shared_prefix", "static_cache"))
            yield None if ours is None or other is None else ours / other

    def _by_unshared(self, cases: Cases) -> Values:
        for name in self._names(cases)[:1]:
            sizes = max(self.model.unshared, key=math.prod)
            ours, other = (_step(cases, name, way, *sizes) for way in ("shared_prefix", "unshared"))
            yield None if ours is None or other is None else other / ours

    def _scaling(self, cases: Cases) -> Values:
        for name in self._names(cases):
            for prefix in self.model.hogwild_prefixes:
                one, several = (_rate(cases, name, "hogwild", workers, prefix) for workers in (1, self.workers))
                yield None if one is None or several is None else several / one

    def _few_rows(self, cases: Cases) -> Values:
        for case in cases:
            if case["way"] == "shared_prefix" and case["rows"] in self.model.few_rows:
                yield case.get("by_floor")

    def _names(self, cases: Cases) -> list[str]:
        return list(self.model.models) if cases else []


def _errors(*dtypes: str) -> Callable[[Cases], Values]:
    """Return a function that yields the largest error of each case, infinity for a failed kernel."""

    def find(cases: Cases) -> Values:
        for case in cases:
            if case["dtype"] in dtypes:
                yield math.inf if "error" in case else case.get("max_error")

    return find


def _graph_errors(cases: Cases) -> Values:
    """Yield the largest logit error of each case, infinity for a failed case."""
    return (math.inf if "error" in case else case.get("max_error") for case in cases)


def _figure(name: str) -> Callable[[Cases], Values]:
    """Return a function that yields a figure of each case that has it, and None for unmeasured cases."""
    return lambda cases: (case.get(name) for case in cases if name in case or "not_measured" in case)


def _versus(name: str) -> Callable[[Cases], Values]:
    """Return a function that yields times relative to a baseline, except where the baseline runs out of memory."""

    def find(cases: Cases) -> Values:
        for case in cases:
            if case.get(name, {}).get("not_measured") != "out of memory":
                yield case.get(f"by_{name}")

    return find


def differences(case: dict[str, Any]) -> list[float]:
    """Return the differences from the output of FlashAttention: of a few rows, and of all if they fit in memory."""
    comparisons = (case.get("rows_checked", {}), case.get("flash", {}))
    return [found["difference"] for found in comparisons if "difference" in found]


def _difference(cases: Cases) -> Values:
    """Yield the largest difference of each case."""
    return (max(found) for case in cases if (found := differences(case)))


def _set_up(cases: Cases) -> Values:
    """Yield the set-up in microseconds."""
    return (case["set_up_seconds"] * 1e6 if "set_up_seconds" in case else None for case in cases)


def _second_start(cases: Cases) -> Values:
    """Yield the seconds by which the first call of a second process is longer, where decode steps are compiled."""
    return (
        case.get("start_seconds") for case in cases if case["process"] == "second" and case.get("compile") is not False
    )


def _step(cases: Cases, model: str, way: str, rows: int, prefix: int) -> float | None:
    """Return the milliseconds of a decode step of one case."""
    rate = _rate(cases, model, way, rows, prefix)
    return None if rate is None else 1e3 * rows / rate


def _rate(cases: Cases, model: str, way: str, rows: int, prefix: int) -> float | None:
    """Return the tokens per second of one case."""
    wanted = {"model": model, "way": way, "rows": rows, "prefix": prefix}
    return next((case.get("tokens_per_second") for case in cases if wanted.items() <= case.items()), None)
