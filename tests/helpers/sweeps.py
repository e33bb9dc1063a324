"""A small sweep with scores that vary, also as a process that can be killed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from serving import small_model

from hf_parallel.evaluation import Problem, Run
from hf_parallel.evaluation.results import COSTS
from hf_parallel.evaluation.sweep import sweep

BUDGETS = (3, 6, 12)
SAMPLING = {"do_sample": True, "temperature": 1.0}


@dataclass(frozen=True)
class Letters(Problem):
    """A problem whose score is a function of the text."""

    name: ClassVar[str] = "letters"
    answer_pattern: ClassVar[str] = r"[aeiou](\w)"

    def score(self, text: str) -> float:
        """Return a number that depends on each character."""
        return sum(map(ord, text)) % 11 / 10


@dataclass(frozen=True)
class Never(Letters):
    """A problem that is answered by the early finisher only."""

    answer_pattern: ClassVar[str] = r"ANSWER:(.*)"


PROBLEMS = [Letters(f"Write {word}.", word) for word in ("one", "two", "three", "four")]
RUNS = [Run(), Run("hogwild", {"num_workers": 2}), Run("self_consistency", {"num_answers": 3})]


def small_sweep(
    output: Path | None = None,
    problems: Sequence[Problem] = PROBLEMS,
    runs: Sequence[Run] = RUNS,
    budgets: Sequence[int] = BUDGETS,
    samples: int = 2,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Sweep over the small problems, by sampling; return results without costs, which differ between equal sweeps."""
    results = sweep(*small_model(), problems, runs, budgets, samples, output=output, **SAMPLING | settings)
    return without_costs(results)


def without_costs(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results without the fields that differ between equal sweeps."""
    return [{name: value for name, value in result.items() if name not in COSTS} for result in results]


def run(output: str) -> None:
    """Run the sweep in a process that may be killed; two generations at a time."""
    torch.set_num_threads(1)
    small_sweep(Path(output), concurrent=2)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the results in the files of a folder, without a broken last line."""
    texts = [path.read_text() for path in sorted(folder.glob("results.rank*.jsonl"))]
    whole = [line for text in texts for line in re.findall(r"(?m)^.*\n", text)]
    return [json.loads(line) for line in whole]
