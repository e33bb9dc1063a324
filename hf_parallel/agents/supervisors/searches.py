"""Supervisors that continue several states, wait for all of them, and choose the next ones by value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Supervisor, best, value_of
from hf_parallel.generation.validation import check_choice


@dataclass
class TreeOfThoughts(Supervisor):
    """Tree of Thoughts (Yao et al., "Tree of Thoughts", 2023, algorithms 1 and 2).

    Breadth-first: each kept state gets `expand` completions, and the `breadth` best new states and finished paths are
    kept. The search ends when all of these have finished. Depth-first: the best new state gets `expand` completions,
    and so on until a path ends; from a dropped path, the search goes back to the best state above.

    If every state fails or is dropped, the search falls back to the best remaining state and finishes it with one
    completion per choice. The budget limits this, too.

    Parameters
    ----------
    breadth : int
        Number of states to keep, breadth-first.
    expand : int
        Completions per choice.
    value : callable
        Value of a state, also of an unfinished path.
    search : {"bfs", "dfs"}
        Breadth-first or depth-first.
    threshold : float, optional
        States with a lower value are dropped. Default: none.
    goal : float, optional
        The search ends with a finished path of at least this value. Default: depth-first, with any finished path that
        is not dropped; breadth-first, with none.
    max_depth : int, optional
        Number of choices of a path that get several completions. Later choices get one. Default: all.
    """

    breadth: int = 5
    expand: int = 5
    search: str = "bfs"
    threshold: float | None = None
    goal: float | None = None
    max_depth: int | None = None
    counts: ClassVar[tuple[str, ...]] = ("breadth", "expand")
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("search", self.search, ("bfs", "dfs"))

    def init(self, root: State) -> None:
        super().init(root)
        self._round: list[State] = []
        self._num_running = 0
        self._is_single = False
        self._stack: list[State] = []  # depth-first: the best of the deepest last
        self.next_states = [root] * self.expand

    def select(self) -> Sequence[State]:
        fired = super().select()
        self._num_running += len(fired)
        return fired

    def commit(self, parent: State, child: State) -> None:
        super().commit(parent, child)
        self._round.append(child)
        self._num_running -= 1
        if self._num_running:
            return
        children = self._round
        self._round = []
        self.next_states = [] if self._is_single else self._choose(children)
        if not self.next_states and not any(state.is_final for state in self.states):
            self.next_states = self._best_open(children if self._is_single else ()) or self._best_open(self.states)
            self._is_single = True

    def _choose(self, children: list[State]) -> list[State]:
        """Return the states to continue after a round, each once per completion."""
        threshold = -math.inf if self.threshold is None else self.threshold
        goal = math.inf
        if self.goal is not None:
            goal = self.goal
        elif self.search == "dfs":
            goal = threshold
        if any(state.is_final and value_of(state) >= goal for state in children):
            return []
        promising = [state for state in children if state.is_choice and value_of(state) >= threshold]
        if self.search == "dfs":
            self._stack.extend(reversed(best(promising, len(promising))))
            chosen = [self._stack.pop()] if self._stack else []
        else:
            ended = [state for state in self.states if state.is_final]
            beam = best([*ended, *promising], self.breadth)
            chosen = [state for state in beam if state.is_choice]
        continued = []
        for state in chosen:
            continued += [state] * self._num_completions(state)
        return continued

    def _num_completions(self, state: State) -> int:
        is_deep = self.max_depth is not None and state.depth - self.root.depth >= self.max_depth
        return 1 if is_deep else self.expand

    @staticmethod
    def _best_open(states: Sequence[State]) -> list[State]:
        """Return a list of the best state without children; empty if there is none."""
        return best([state for state in states if state.is_choice and not state.num_children], 1)


@dataclass
class BeamSearch(TreeOfThoughts):
    """Beam search over steps (Snell et al., "Scaling LLM Test-Time Compute Optimally", 2024, section 5.2).

    `TreeOfThoughts` whose first choice gets `breadth * expand` completions. A finished path keeps its place in the beam
    while it is among the best.
    """

    def init(self, root: State) -> None:
        super().init(root)
        self.next_states = [root] * (self.breadth * self.expand)
