"""Tokens per second of whole models with random weights (Hydragen, section 4.1; Hogwild!, table 1).

Steps after the prefill are timed when their tokens reach the CPU, and therefore include all costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from .cases import Bench, Case, Figures, Target, figure
from .models import kv_bytes_per_token, weight_bytes
from .ways import WAYS

Size = tuple[int, int]
"""Rows, and length of the prefix."""


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

    share: ClassVar[float] = 0.38

    models: tuple[str, ...] = ("Qwen3-8B", "Llama-2-7B")
    rows: tuple[int, ...] = (1024, 32, 128, 512)
    prefixes: tuple[int, ...] = (1024, 16384, 4096)
    few_rows: tuple[int, ...] = (1, 2, 4, 8)
    compared_rows: tuple[int, ...] = (128,)
    workers: tuple[int, ...] = (1, 4, 2, 8)
    hogwild_prefixes: tuple[int, ...] = (4096, 16384)
    unshared: tuple[tuple[int, int], ...] = ((128, 1024), (32, 4096), (16, 16384), (32, 16384))
    steps: int = 48

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations: first the sizes of the targets, last the slowest baselines.

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
        compared = [("unshared", *size) for size in self.unshared] + [*uncompiled]
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
            run = partial(self._measure, bench, name, way, rows, prefix)
            yield Case({"model": name, "way": way, "rows": rows, "prefix": prefix}, run)

    def _measure(self, bench: Bench, name: str, way: str, rows: int, prefix: int) -> dict[str, Any]:
        """Measure one method; the floor of a step is the time to read weights, keys and values once."""
        model = bench.models.get(name)
        figures = WAYS[way](model, rows, prefix, self.steps, bench.deadline)
        if way in ("shared_prefix", "uncompiled") and "step_seconds" in figures:
            tokens = prefix + rows * self.steps // 2
            floor = bench.ceilings.limit(weight_bytes(model) + tokens * kv_bytes_per_token(model))
            figures |= {"floor_seconds": floor, "by_floor": figures["step_seconds"] / floor}
        return figures

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        name, rows, few, compared = self.models[0], max(self.rows), self.few_rows, max(self.compared_rows)
        short, middle, long = min(self.prefixes), sorted(self.prefixes)[len(self.prefixes) // 2], max(self.prefixes)
        most = max(self.workers, key=lambda workers: (workers <= 4, workers))

        def step(way: str, size: Size) -> Callable[[list[Figures]], Iterable[float | None]]:
            wanted = {"model": name, "way": way, "rows": size[0], "prefix": size[1]}
            return lambda cases: [next((c.get("step_seconds") for c in cases if wanted.items() <= c.items()), None)]

        def speed(what: str, way: str, size: Size, other: str, other_size: Size, limit: float) -> Target:
            """Tokens per second of a way and size, relative to another way and size."""

            def values(cases: list[Figures]) -> Iterable[float | None]:
                (ours,), (theirs,) = step(way, size)(cases), step(other, other_size)(cases)
                yield None if ours is None or theirs is None else theirs / ours * size[0] / other_size[0]

            what = f"{name}, {way}, {size[0]} rows over {size[1]}: speed relative to {what}"
            return Target(what, values, limit, at_least=True)

        ours, by_floor = "shared_prefix", f"{min(few)} to {max(few)} rows: step relative to weight reads"
        copies = max(self.unshared, key=math.prod)
        return [
            speed(f"{short}", ours, (rows, long), ours, (rows, short), 0.85),
            speed("no attention", ours, (rows, middle), "no_attention", (rows, middle), 0.85),
            *(
                speed("1 row", "hogwild", (most, prefix), "hogwild", (1, prefix), 0.95 * most)
                for prefix in self.hogwild_prefixes
            ),
            Target(by_floor, figure("by_floor", lambda case: case["way"] == ours and case["rows"] in few), 1.4),
            Target(f"{name}, {compared} rows over {short}: step, s", step(ours, (compared, short)), 7e-3),
            Target(f"{name}, {rows} rows over {short}: step, s", step(ours, (rows, short)), rows / 32_000),
            speed("generate with a compiled static cache", ours, (few[0], short), "static_cache", (few[0], short), 1.5),
            speed("a copy of the prompt per row", ours, copies, "unshared", copies, 4.0),
        ]
