"""RoundSearch: base of the searches that compare all children of a round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Fire, Supervisor, best


@dataclass(kw_only=True)
class RoundSearch(Supervisor):
    """Continues several states, waits for all of them, and chooses the next ones by value.

    If every state fails or is dropped, the search falls back to the best remaining state and finishes it with one
    completion per choice. The budget limits this, too.
    """

    compares: ClassVar[bool] = True

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self._round: list[State] = []
        self._num_running = 0
        self._is_single = False

    @abstractmethod
    def choose(self, children: list[State]) -> list[State]:
        """Return the states to continue after a round, each once per completion."""

    def select(self) -> Sequence[State | Fire]:
        """Return the states of the next round."""
        fired = super().select()
        self._num_running += len(fired)
        return fired

    def commit(self, parent: State, child: State) -> None:
        """Choose the next states once a round is complete."""
        super().commit(parent, child)
        self._round.append(child)
        self._num_running -= 1
        if self._num_running:
            return
        children, self._round = self._round, []
        self.next_states = [] if self._is_single else self.choose(children)
        if not self.next_states and not any(state.is_final for state in self.states):
            self.next_states = self._best_open(children if self._is_single else ()) or self._best_open(self.states)
            self._is_single = True

    @staticmethod
    def _best_open(states: Sequence[State]) -> list[State]:
        """Return a list of the best state without children; empty if there is none."""
        return best([state for state in states if state.is_choice and not state.num_children], 1)
