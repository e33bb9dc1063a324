"""RoundSearch: base of the searches that compare all children of a round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Fire, Supervisor, value_of


@dataclass(kw_only=True)
class RoundSearch(Supervisor):
    """Continues several states, waits for all of them, and chooses the next ones by value.

    A search may come to a point where nothing is left to continue and no path has ended: the last states have failed,
    or are below a threshold. Then it continues the best of the other states, with one completion for each choice, until
    a path ends: the agent gets an answer whenever one can be had. The budget limits this, too; it is no reason to go
    on singly, which would exceed it.
    """

    needs_value: ClassVar[bool] = True

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self.next_states: list[State] = []
        self._round: list[State] = []
        self._num_running = 0
        self._is_single = False

    @abstractmethod
    def choose(self, children: list[State]) -> list[State]:
        """Return the states to continue after a round, each as often as it is continued."""

    def select(self) -> Sequence[State | Fire]:
        """Return the states of the next round."""
        fired, self.next_states = self.next_states, []
        self._num_running += len(fired)
        return fired

    def commit(self, parent: State, child: State) -> None:
        """Choose the next states after the last of a round."""
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
        """Return the best state that was not continued yet, if there is one."""
        unused = [state for state in states if state.is_choice and not state.num_children]
        return [max(unused, key=value_of)] if unused else []

    def evaluates(self, state: State) -> bool:
        """Return True: unfinished paths are compared as well."""
        return True


def best(states: Sequence[State], count: int) -> list[State]:
    """Return the states of the highest values, the first among equals."""
    return sorted(states, key=value_of, reverse=True)[:count]
