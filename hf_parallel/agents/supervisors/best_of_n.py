"""BestOfN: the best of several runs of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.single import Single


@dataclass
class BestOfN(Single):
    """Best of n paths (Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021).

    All paths run to their end at the same time. The first one of the highest value wins. Completions need
    `do_sample=True`, or all are equal.

    Parameters
    ----------
    n : int
        Number of paths.
    value : callable, optional
        Value of the end of a path. Default: the first path that does not fail wins.
    """

    n: int
    counts: ClassVar[tuple[str, ...]] = ("n",)

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self.next_states = [root] * self.n
