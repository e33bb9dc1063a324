"""Stage 6: what was to be reached, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .attention import AttentionStage
from .graphs import TOLERANCE
from .hogwild import HogwildStage
from .model import ModelStage

DIFFERENCE = 0.02
"""By how much outputs in bf16 may differ: several times their rounding, a fraction of what a forgotten block does."""

Values = Iterator[float | None]
Cases = list[dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """One requirement: all values of `find` must be at most (or at least) `limit`.

    Parameters
    ----------
    what : str
    stage : str
        Whose cases `find` is given.
    find : callable
        Yields one value per case that the requirement speaks of, None where it was not measured.
    limit : float
    at_least : bool
        Whether values must be at least the limit.
    """

    what: str
    stage: str
    find: Callable[[Cases], Values]
    limit: float
    at_least: bool = False

    def judge(self, stages: dict[str, Any]) -> dict[str, Any]:
        """The worst value, of how many, and whether the limit was met, missed or not (fully) measured."""
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
    """The requirements.

    Parameters
    ----------
    attention, hogwild, model
        The stages, of which the requirements name sizes.
    large_kv_bytes : int
        Unique keys and values from which on attention must be near the limit.
    long_tokens : int
        Tokens from which on Hogwild's attention is compared.
    workers : int
        Workers that are compared.
    """

    attention: AttentionStage
    hogwild: HogwildStage
    model: ModelStage
    large_kv_bytes: int
    long_tokens: int
    workers: int

    def table(self, stages: dict[str, Any]) -> list[dict[str, Any]]:
        """All lines, judged."""
        return [line.judge(stages) for line in self._lines()]

    def _lines(self) -> list[Line]:
        w, rows, prefixes = self.workers, max(self.model.rows), self.model.prefixes
        return [
            Line("kernels, bf16 and fp16: largest error", "correctness", _errors("bfloat16", "float16"), 2e-2),
            Line("kernels, fp32: largest error", "correctness", _errors("float32"), 1e-5),
            Line("kernels: error by FlashAttention's", "correctness", _figure("error_by_flash"), 1.5),
            Line("replayed decode steps: largest error of a logit", "graphs", _graph_errors, TOLERANCE),
            Line("attention: difference from FlashAttention's output", "attention", _difference, DIFFERENCE),
            Line("attention: share of the limit, large KV", "attention", self._large_kv, 0.85, at_least=True),
            Line("attention: time by FlashAttention's", "attention", _versus("flash"), 1.0),
            Line("attention: time by FlashInfer's cascade", "attention", _versus("flashinfer"), 1.0),
            Line(f"hogwild, {w} workers: attention by FlashAttention's", "hogwild", self._hogwild_attention, 1.15),
            Line("hogwild: set-up of a step, us", "hogwild", _set_up, 50.0),
            Line(f"model, {rows} rows: lost from prefix {min(prefixes)} to {max(prefixes)}", "model", self._loss, 0.05),
            Line(
                f"model, {rows} rows: throughput by no attention's", "model", self._by_no_attention, 0.9, at_least=True
            ),
            Line(f"model, hogwild: tokens/s of {w} workers by 1", "model", self._scaling, 0.95 * w, at_least=True),
            Line(
                f"model, {min(self.model.few_rows)} to {max(self.model.few_rows)} rows: step by its floor",
                "model",
                self._few_rows,
                1.3,
            ),
        ]

    def _large_kv(self, cases: Cases) -> Values:
        for case in cases:
            if case["kv_bytes"] >= self.large_kv_bytes:
                yield case.get("of_limit")

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
            for prefix in self.model.prefixes:
                ours, most = (
                    _rate(cases, name, way, max(self.model.rows), prefix) for way in ("shared_prefix", "no_attention")
                )
                yield None if ours is None or most is None else ours / most

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
    """Largest errors; one that is no number, or a kernel that fails, is infinite."""

    def find(cases: Cases) -> Values:
        for case in cases:
            if case["dtype"] in dtypes:
                yield math.inf if "error" in case else case.get("max_error")

    return find


def _graph_errors(cases: Cases) -> Values:
    """Errors of logits; a way that fails is infinitely wrong."""
    return (math.inf if "error" in case else case.get("max_error") for case in cases)


def _figure(name: str) -> Callable[[Cases], Values]:
    """A figure of the cases that have it or were not measured."""
    return lambda cases: (case.get(name) for case in cases if name in case or "not_measured" in case)


def _versus(name: str) -> Callable[[Cases], Values]:
    """Time by another's; where the other has not the memory there is nothing to compare."""

    def find(cases: Cases) -> Values:
        for case in cases:
            if case.get(name, {}).get("not_measured") != "out of memory":
                yield case.get(f"by_{name}")

    return find


def differences(case: dict[str, Any]) -> list[float]:
    """Between our output and FlashAttention's: of a few rows, and of all where they fit the memory."""
    comparisons = (case.get("rows_checked", {}), case.get("flash", {}))
    return [found["difference"] for found in comparisons if "difference" in found]


def _difference(cases: Cases) -> Values:
    """The largest, wherever there is one."""
    return (max(found) for case in cases if (found := differences(case)))


def _set_up(cases: Cases) -> Values:
    """In microseconds."""
    return (case["set_up_seconds"] * 1e6 if "set_up_seconds" in case else None for case in cases)


def _rate(cases: Cases, model: str, way: str, rows: int, prefix: int) -> float | None:
    """Tokens per second of one case."""
    wanted = {"model": model, "way": way, "rows": rows, "prefix": prefix}
    return next((case.get("tokens_per_second") for case in cases if wanted.items() <= case.items()), None)
