"""TreeOfThoughts: breadth-first and depth-first search over an agent's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import best, check_number, value_of
from hf_parallel.agents.supervisors.rounds import RoundSearch
from hf_parallel.generation.validation import check_choice, check_int


@dataclass
class TreeOfThoughts(RoundSearch):
    """Tree of Thoughts (Yao et al., "Tree of Thoughts", 2023, algorithms 1 and 2).

    Breadth-first: each kept state gets `expand` completions, and the `breadth` best new states and finished paths are
    kept. The search ends when all of these have finished. Depth-first: the best new state gets `expand` completions,
    and so on until a path ends; from a dropped path, the search goes back to the best state above. See `RoundSearch`
    for searches whose states all fail or are dropped.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("search", self.search, ("bfs", "dfs"))
        for name in ("threshold", "goal"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if self.max_depth is not None:
            check_int("max_depth", self.max_depth, at_least=1)

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self._stack: list[State] = []  # depth-first: the best of the deepest last
        self.next_states = [root] * self.expand

    def choose(self, children: list[State]) -> list[State]:
        """Return the states to continue."""
        threshold = float("-inf") if self.threshold is None else self.threshold
        goal = self.goal if self.goal is not None else threshold if self.search == "dfs" else float("inf")
        if any(state.is_final and value_of(state) >= goal for state in children):
            return []
        kept = [state for state in children if state.is_choice and value_of(state) >= threshold]
        if self.search == "dfs":
            self._stack.extend(reversed(best(kept, len(kept))))
            chosen = [self._stack.pop()] if self._stack else []
        else:
            ended = [state for state in self.states if state.is_final]
            chosen = [state for state in best([*ended, *kept], self.breadth) if state.is_choice]
        return [state for state in chosen for _ in range(self._num_completions(state))]

    def _num_completions(self, state: State) -> int:
        is_deep = self.max_depth is not None and state.depth - self.root.depth >= self.max_depth
        return 1 if is_deep else self.expand
