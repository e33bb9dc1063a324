"""Tokens per second of whole models with random weights (Hydragen, section 4.1; Hogwild!, table 1).

Steps after the prefill are timed when their tokens reach the CPU, and therefore include all costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from .cases import Case
from .models import Models, kv_bytes_per_token, weight_bytes
from .timing import Ceilings, Deadline
from .ways import HAS_COMPILE, WAYS


@dataclass(frozen=True)
class ModelStage:
    """Settings and cases.

    Parameters
    ----------
    models : tuple of str
        Keys of `CONFIGS`.
    rows, prefixes : tuple of int
        Numbers of rows, and lengths of the shared prefix.
    few_rows : tuple of int
        Numbers of rows for which reading the weights dominates a step.
    compared_rows : tuple of int
        Further numbers of rows at which decoding with and without compilation is compared.
    workers, hogwild_prefixes : tuple of int
    unshared : tuple of (int, int)
        Numbers of rows and lengths of the prefix at which sharing is compared with a copy of the prompt per row.
    steps : int
        Number of tokens per row.
    """

    models: tuple[str, ...] = ("Qwen3-8B", "Llama-2-7B")
    rows: tuple[int, ...] = (1024, 32, 128, 512)
    prefixes: tuple[int, ...] = (1024, 16384, 4096)
    few_rows: tuple[int, ...] = (1, 2, 4, 8)
    compared_rows: tuple[int, ...] = (128,)
    workers: tuple[int, ...] = (1, 4, 2, 8)
    hogwild_prefixes: tuple[int, ...] = (4096, 16384)
    unshared: tuple[tuple[int, int], ...] = ((128, 1024), (32, 4096), (16, 16384), (32, 16384))
    steps: int = 48

    def cases(self, models: Models, ceilings: Ceilings, deadline: Deadline) -> Iterator[Case]:
        """Yield all combinations: those of the targets first, the slowest baselines last.

        The first model is measured before the others, whose baselines are left out.
        """
        most, *fewer = self.rows
        short, ours = self.prefixes[:1], ("shared_prefix", "no_attention")
        targets = [
            *itertools.product(["shared_prefix"], self.few_rows, short),
            *itertools.product(ours, [most], self.prefixes),
            *itertools.product(["shared_prefix"], self.compared_rows, short),
            *itertools.product(["hogwild"], self.workers, self.hogwild_prefixes),
        ]
        others = [("shared_prefix", *size) for size in self.unshared] + [*itertools.product(ours, fewer, self.prefixes)]
        uncompiled = itertools.product(["uncompiled"], [*self.few_rows, *self.compared_rows, most], short)
        compared = [("unshared", *size) for size in self.unshared] + [*uncompiled] * HAS_COMPILE
        baselines = [
            *itertools.product(["static_cache"], self.few_rows[:1], short),
            *itertools.product(["generate"], self.few_rows[:1], sorted({*short, *self.hogwild_prefixes})),
            *itertools.product(["generate"], sorted(self.rows), self.prefixes),
        ]
        slowest = [*itertools.product(["generate_batch"], sorted(self.rows), self.prefixes)]
        first, *rest = self.models
        order = [
            *itertools.product([first], targets + baselines[:1] + compared + others + baselines[1:]),
            *itertools.product(rest, targets),
            *itertools.product(rest, others),
            *itertools.product([first], slowest),
        ]
        seen = set()
        for name, (way, rows, prefix) in order:
            if (name, way, rows, prefix) in seen:
                continue
            seen.add((name, way, rows, prefix))
            run = partial(self._measure, models, ceilings, deadline, name, way, rows, prefix)
            yield Case({"model": name, "way": way, "rows": rows, "prefix": prefix}, run)

    def _measure(
        self, models: Models, ceilings: Ceilings, deadline: Deadline, name: str, way: str, rows: int, prefix: int
    ) -> dict[str, Any]:
        """Measure one method; the floor of a step is the time to read weights, keys and values once."""
        model = models.get(name)
        figures = WAYS[way](model, rows, prefix, self.steps, deadline)
        if way in ("shared_prefix", "uncompiled") and "step_seconds" in figures:
            tokens = prefix + rows * self.steps // 2
            floor = ceilings.limit(weight_bytes(model) + tokens * kv_bytes_per_token(model))
            figures |= {"floor_seconds": floor, "by_floor": figures["step_seconds"] / floor}
        return figures
