"""Completions of one prompt on a hybrid: states of all rows, compared with `generate` over a prompt of 4 tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from .cases import Bench, Case, Figures, Target
from .ways import WAYS

BOUND_PROMPT = 4


@dataclass(frozen=True)
class HybridsStage:
    """Settings and cases.

    Parameters
    ----------
    model : str
        Key of `CONFIGS`.
    rows : tuple of int
    prefix, steps : int
        Length of the prompt, and number of tokens per row.
    """

    share: ClassVar[float] = 0.08

    model: str = "Qwen3.5-9B"
    rows: tuple[int, ...] = (16, 1, 128)
    prefix: int = 16384
    steps: int = 32

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield the prefill of one row by `generate`, then each number of rows over the prompt and over 4 tokens."""
        sizes = [("prefilled", 1, self.prefix)]
        for rows in self.rows:
            sizes += [("shared_prefix", rows, self.prefix), ("prefilled", rows, BOUND_PROMPT)]
        for way, rows, prefix in sizes:
            run = partial(self._measure, bench, way, rows, prefix)
            yield Case({"model": self.model, "way": way, "rows": rows, "prefix": prefix}, run)

    def _measure(self, bench: Bench, way: str, rows: int, prefix: int) -> dict[str, Any]:
        return WAYS[way](bench.models.get(self.model), rows, prefix, self.steps, bench.deadline)

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""

        def ratios(name: str, bound_of: Any, cases: list[Figures]) -> Iterable[float | None]:
            known = {(case["way"], case["rows"], case["prefix"]): case.get(name) for case in cases}
            for rows in self.rows:
                ours, bound = known.get(("shared_prefix", rows, self.prefix)), known.get(bound_of(rows))
                yield None if ours is None or bound is None else ours / bound

        step = partial(ratios, "step_seconds", lambda rows: ("prefilled", rows, BOUND_PROMPT))
        prefill = partial(ratios, "first_token_seconds", lambda rows: ("prefilled", 1, self.prefix))
        return [
            Target(f"{self.model}: decode step relative to generate's over {BOUND_PROMPT} tokens", step, 1.25),
            Target(f"{self.model}: time to the first token relative to generate's of one row", prefill, 1.1),
        ]
