"""Targets of the GPU benchmark, compared with the measured figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .graphs import TOLERANCE
from .model import ModelStage

DIFFERENCE = 0.02
"""Tolerance of bf16 outputs: several times the rounding error, a fraction of the error caused by a missing block."""

Cases = list[dict[str, Any]]
Values = Callable[[Cases], Iterable[float | None]]
"""One value per relevant case; None if it was not measured."""


@dataclass(frozen=True)
class Target:
    """Target: all values of a stage's cases are at most (or at least) `limit`."""

    what: str
    stage: str
    values: Values
    limit: float
    at_least: bool = False

    def judge(self, stages: dict[str, Any]) -> dict[str, Any]:
        """Return the worst value, the number of values, and the status: met, missed or not (fully) measured."""
        cases = stages.get(self.stage, {}).get("cases", [])
        values = list(self.values(cases)) if cases else []
        measured = [value for value in values if value is not None]
        worst = (min if self.at_least else max)(measured, default=None)
        if worst is not None and not (worst >= self.limit if self.at_least else worst <= self.limit):
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


def targets(model: ModelStage, large_kv_bytes: int, long_tokens: int, workers: int) -> list[Target]:
    """Return all targets.

    Parameters
    ----------
    model : ModelStage
        Stage whose sizes appear in the targets.
    large_kv_bytes : int
        Minimum size of the unique keys and values for the targets of attention.
    long_tokens : int
        Minimum number of tokens for the target of Hogwild! attention.
    workers : int
        Number of workers in the targets.
    """
    name, rows, few, compared = model.models[0], max(model.rows), model.few_rows, max(model.compared_rows)
    prefixes = sorted(model.prefixes)
    short, middle, long = prefixes[0], prefixes[len(prefixes) // 2], prefixes[-1]

    def step(cases: Cases, way: str, size: tuple[int, int]) -> float | None:
        wanted = {"model": name, "way": way, "rows": size[0], "prefix": size[1]}
        return next((case.get("step_seconds") for case in cases if wanted.items() <= case.items()), None)

    def ratio(way: str, size: tuple[int, int], other: str, other_size: tuple[int, int]) -> Values:
        """Tokens per second of a way and size, relative to those of another."""

        def values(cases: Cases) -> Iterable[float | None]:
            ours, theirs = step(cases, way, size), step(cases, other, other_size)
            yield None if ours is None or theirs is None else theirs / ours * size[0] / other_size[0]

        return values

    def speeds_up(what: str, size: tuple[int, int], other: str, limit: float) -> Target:
        what = f"{name}, {size[0]} rows over {size[1]}: speed relative to {what}"
        return Target(what, "model", ratio("shared_prefix", size, other, size), limit, at_least=True)

    def attention_limit(bound: str, limit: float) -> Target:
        """Share of the hardware's limit; a case that was not measured counts for both bounds."""
        what = f"attention, bound by {bound}: fraction of the hardware limit, large KV"

        def is_large(case: dict[str, Any]) -> bool:
            return bool(case["kv_bytes"] >= large_kv_bytes and case.get("bound", bound) == bound)

        return Target(what, "attention", _figure("of_limit", is_large), limit, at_least=True)

    return [
        Target("kernels, bf16 and fp16: largest error", "correctness", _errors("bfloat16", "float16"), 2e-2),
        Target("kernels, fp32: largest error", "correctness", _errors("float32"), 1e-5),
        Target("kernels: error relative to FlashAttention's", "correctness", _figure("error_by_flash"), 1.5),
        Target("replayed decode steps: largest error of a logit", "graphs", _errors(), TOLERANCE),
        Target(
            "attention: difference from FlashAttention's output",
            "attention",
            lambda cases: (max(found) for case in cases if (found := differences(case))),
            DIFFERENCE,
        ),
        attention_limit("memory", 0.85),
        attention_limit("compute", 0.70),
        Target("attention: time relative to FlashAttention", "attention", _versus("flash"), 1.0),
        Target("attention: time relative to FlashInfer's cascade", "attention", _versus("flashinfer"), 1.0),
        Target(
            f"hogwild, {workers} workers: attention relative to FlashAttention",
            "hogwild",
            _figure("by_flash", lambda case: case["workers"] == workers and case["tokens"] >= long_tokens),
            1.15,
        ),
        Target("hogwild: set-up of a step, s", "hogwild", _figure("set_up_seconds"), 50e-6),
        Target(
            f"{name}, {rows} rows over {long}: speed relative to {short}",
            "model",
            ratio("shared_prefix", (rows, long), "shared_prefix", (rows, short)),
            0.85,
            at_least=True,
        ),
        speeds_up("no attention", (rows, middle), "no_attention", 0.85),
        *(
            Target(
                f"{name}, hogwild over {prefix}: speed of {workers} workers relative to 1",
                "model",
                ratio("hogwild", (workers, prefix), "hogwild", (1, prefix)),
                0.95 * workers,
                at_least=True,
            )
            for prefix in model.hogwild_prefixes
        ),
        Target(
            f"{min(few)} to {max(few)} rows: step relative to weight reads",
            "model",
            _figure("by_floor", lambda case: case["way"] == "shared_prefix" and case["rows"] in few),
            1.4,
        ),
        Target(
            f"{name}, {compared} rows over {short}: step, s",
            "model",
            lambda cases: [step(cases, "shared_prefix", (compared, short))],
            7e-3,
        ),
        Target(
            f"{name}, {rows} rows over {short}: step, s",
            "model",
            lambda cases: [step(cases, "shared_prefix", (rows, short))],
            rows / 32_000,
        ),
        speeds_up("generate with a compiled static cache", (few[0], short), "static_cache", 1.5),
        speeds_up("a copy of the prompt per row", max(model.unshared, key=math.prod), "unshared", 4.0),
        Target("prefill: time relative to one forward pass", "prefill", _figure("by_plain"), 1.02),
        Target(
            "compiled decode: start of a second process, s",
            "start",
            _figure("start_seconds", lambda case: case["process"] == "second" and case.get("compile") is not False),
            5.0,
        ),
        Target("sampling, most rows: ms more than greedy", "sampling", _figure("ms_over_greedy"), 2.8),
    ]


def differences(case: dict[str, Any]) -> list[float]:
    """Return the differences from the output of FlashAttention: of a few rows, and of all if they fit in memory."""
    comparisons = (case.get("rows_checked", {}), case.get("flash", {}))
    return [found["difference"] for found in comparisons if "difference" in found]


def _figure(name: str, selects: Callable[[dict[str, Any]], bool] = lambda case: True) -> Values:
    """Yield a figure of each selected case that has it, and None for cases that were not measured."""
    return lambda cases: (
        case.get(name) for case in cases if (name in case or "not_measured" in case) and selects(case)
    )


def _errors(*dtypes: str) -> Values:
    """Yield the largest error of each case in these dtypes, infinity for a failed one."""
    return lambda cases: (
        math.inf if "error" in case else case.get("max_error")
        for case in cases
        if not dtypes or case["dtype"] in dtypes
    )


def _versus(name: str) -> Values:
    """Yield times relative to a baseline, except where the baseline runs out of memory."""
    return lambda cases: (
        case.get(f"by_{name}") for case in cases if case.get(name, {}).get("not_measured") != "out of memory"
    )
