"""Output of the fork_join mode: answers, and the forks in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from hf_parallel.generation.modes.branches.output import StageStats
from hf_parallel.generation.outputs import ALWAYS, ParallelOutput


@dataclass
class Path:
    """A path of a fork."""

    number: str
    """Its number, as the region's outline names it."""
    index: int
    """Its place among all paths of the answer, in the order in which they begin; streams name it `Path {index}`."""
    text: str
    """Its text, tags included, with the paths of its own forks in order."""
    tokens: list[int]
    """The tokens of this text."""
    ended_by: str
    """`tag` (its closing tag), `eos`, `criterion` or `budget`. The closing tag is appended to what ended otherwise."""
    forks: list[Fork] = field(default_factory=list)


@dataclass
class Fork:
    """A fork in an answer or in a path."""

    start: int
    end: int
    """Slice of the paths' tokens in the tokens of the answer or path."""
    paths: list[Path]


@dataclass
class ForkJoinOutput(ParallelOutput):
    """Output of `generation_mode="fork_join"`.

    Attributes
    ----------
    forks : list of list of Fork
        The forks of each answer.
    transcripts : list of str
        Text of each answer, the paths of its forks in order.
    critical_path : list of int
        Decode steps that each answer needs: its own tokens, and for each fork those of its longest path.
    fallback : list of str or None
        Why the last region that an answer opened has not forked; None if all have.
    stages : dict of StageStats
        Cost of `skeleton` (the text up to the first fork), `branches` (the paths) and `continuation`.
    """

    item_names: ClassVar[Mapping[str, str]] = {"transcripts": "transcript"}

    forks: list[list[Fork]] = ALWAYS
    transcripts: list[str] = ALWAYS
    critical_path: list[int] = ALWAYS
    fallback: list[str | None] = ALWAYS
    stages: dict[str, StageStats] = ALWAYS

    def columns(self, prompt: int) -> list[str]:
        names: dict[int, str] = {}
        counts: Counter[str] = Counter()

        def add(forks: list[Fork], before: str) -> None:
            for path in (path for fork in forks for path in fork.paths):
                number = path.number if path.number.startswith(before) else before + path.number
                counts[number] += 1
                names[path.index] = f"Path {number}" + f" ({counts[number]})" * (counts[number] > 1)
                add(path.forks, f"{number}.")

        add(self.forks[prompt], "")
        return [name for _, name in sorted(names.items())]
