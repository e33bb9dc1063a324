"""TreeQuest: an algorithm of the package `treequest` as a supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.rounds import RoundSearch
from hf_parallel.generation.validation import check_int

T = TypeVar("T")
ACTION = "generate"


@dataclass
class TreeQuest(RoundSearch):
    """Tree search by an algorithm of `treequest`, such as AB-MCTS (Inoue et al., "Wider or Deeper?", 2025).

    The agent's states are the algorithm's nodes. The algorithm chooses a batch of nodes to expand; each gets one
    completion, and the algorithm receives the new state with its value. If it chooses a finished path, it receives the
    same state and value again; a failed path has the value 0. Both count as iterations.

    Install the package with `pip install hf_parallel[treequest]`.

    Parameters
    ----------
    algorithm : treequest.Algorithm
        For example `treequest.ABMCTSA()` or `treequest.StandardMCTS()`.
    iterations : int
        Number of nodes.
    parallel : int
        Number of nodes expanded at the same time. Some algorithms discard results beyond their own batch.
    seed : int
        Seed of NumPy's global generator, which algorithms use.
    value : callable
        Value of a state from 0 to 1, also of an unfinished path.

    Examples
    --------
    >>> solve.under(TreeQuest(treequest.ABMCTSA(), 32, parallel=4, value=score))
    """

    algorithm: Any
    iterations: int
    parallel: int = 1
    seed: int = 0
    counts: ClassVar[tuple[str, ...]] = ("iterations", "parallel")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(callable(getattr(self.algorithm, name, None)) for name in ("init_tree", "ask_batch", "tell")):
            raise ValueError(f"algorithm must be a treequest.Algorithm such as ABMCTSA(), got {self.algorithm!r}")
        check_int("seed", self.seed, at_least=0)

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self._random = np.random.RandomState(self.seed).get_state()
        self._tree = self.algorithm.init_tree()
        self._num_left = self.iterations
        self._trials: list[str] = []
        self.next_states = self._ask()

    def choose(self, children: list[State]) -> list[State]:
        """Pass the new states to the algorithm, and ask it for the next."""
        for trial, child in zip(self._trials, children, strict=True):
            self._tell(trial, child)
        return self._ask()

    def _ask(self) -> list[State]:
        chosen: list[State] = []
        self._trials = []
        while self._num_left and not chosen:
            count = min(self.parallel, self._num_left)
            self._tree, trials = self._seeded(self.algorithm.ask_batch, self._tree, count, [ACTION])
            if not trials:
                break
            self._num_left -= len(trials)
            for trial in trials:
                state = self.root if trial.parent_state is None else trial.parent_state
                if state.is_choice:
                    chosen.append(state)
                    self._trials.append(trial.trial_id)
                else:
                    self._tell(trial.trial_id, state)
        return chosen

    def _tell(self, trial: str, state: State) -> None:
        value = 0.0 if state.value is None else state.value
        if not 0 <= value <= 1:
            raise ValueError(f"the value of {state!r} must be from 0 to 1 for TreeQuest, got {value!r}")
        self._tree = self._seeded(self.algorithm.tell, self._tree, trial, (state, value))

    def _seeded(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function with this search's random state."""
        outside = np.random.get_state()
        np.random.set_state(self._random)
        try:
            return function(*arguments)
        finally:
            self._random = np.random.get_state()
            np.random.set_state(outside)
