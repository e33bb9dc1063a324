"""DVTS: several independent trees; each continues its best step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Fire, Supervisor
from hf_parallel.agents.supervisors.beam_search import BeamSearch


@dataclass
class DVTS(Supervisor):
    """Diverse verifier tree search (Beeching et al., "Scaling Test-Time Compute with Open Models", 2024).

    In each tree, a choice gets `expand` completions, and the best new state continues. Trees do not compete or wait for
    each other. The best finished path of all trees wins.

    Parameters
    ----------
    trees : int
        Number of trees.
    expand : int
        Completions per choice.
    value : callable
        Value of a state, also of an unfinished path.
    """

    trees: int
    expand: int
    counts: ClassVar[tuple[str, ...]] = ("trees", "expand")
    compares: ClassVar[bool] = True

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self._trees = [BeamSearch(1, self.expand, value=self.value) for _ in range(self.trees)]
        for tree in self._trees:
            tree.init(root)
        self._running: deque[BeamSearch] = deque()  # tree of each running transition, in firing order

    def select(self) -> Sequence[State | Fire]:
        """Return the states that each tree continues."""
        fired: list[State | Fire] = []
        for tree in self._trees:
            states = tree.select()
            self._running.extend([tree] * len(states))
            fired.extend(states)
        return fired

    def commit(self, parent: State, child: State) -> None:
        """Pass the new state to its tree."""
        super().commit(parent, child)
        self._running.popleft().commit(parent, child)
