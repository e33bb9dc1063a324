"""Supervisor: a test-time scaling algorithm that searches over the choices of an agent (Hive, section 5.1.1).

It is independent of the agent. The runtime asks it for states to continue, and passes it the new states.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.generation.validation import check_int

ValueFunction = Callable[[State], float | Awaitable[float]]
"""Returns the value of a state; higher is better. May be a coroutine function that uses `Chat`, `spawn` and `tool`."""


@dataclass(kw_only=True)
class Supervisor:
    """Base class: settings, and the state of one search.

    A search goes from the agent's start or a yield to its next yield or end. The runtime copies the supervisor for each
    search, calls `init` once, then `select` and `commit` in turn. New states are committed in the order in which they
    were selected, so a search does not depend on how long each takes. It ends when `select` returns nothing and nothing
    runs.

    Parameters
    ----------
    value : callable, optional
        Value of a state, see `ValueFunction`.
    max_tokens, max_passes : int, optional
        Budgets of a search: new tokens of the committed states, and forward passes of the engine in the meantime. Once
        one is used up, no more states are continued. A completion whose logits are all cached needs no pass.

    Attributes
    ----------
    states : list of State
        Committed states.
    next_states : list of State
        States that `select` returns next.
    """

    value: ValueFunction | None = None
    max_tokens: int | None = None
    max_passes: int | None = None
    states: list[State] = field(default_factory=list, init=False, repr=False)
    next_states: list[State] = field(default_factory=list, init=False, repr=False)
    counts: ClassVar[tuple[str, ...]] = ()
    """Settings that must be an int of at least 1."""
    compares: ClassVar[bool] = False
    """Whether unfinished states are compared: a value function is required, and called for all states."""
    continues_once: ClassVar[bool] = False
    """Whether no state is continued twice. Not inherited: a subclass may continue states again."""

    def __post_init__(self) -> None:
        for name in (*self.counts, "max_tokens", "max_passes"):
            number = getattr(self, name)
            if number is not None or name in self.counts:
                check_int(name, number, at_least=1)
        needs_value = self.value is not None or self.compares
        if needs_value and not callable(self.value):
            raise ValueError(f"value must be a function of a state, got {self.value!r}")

    def init(self, root: State) -> None:
        """Begin a search from a state before a choice."""
        self.root = root
        self.states = []
        self.next_states = []

    def select(self) -> Sequence[State]:
        """Return states to continue now; a state may occur several times."""
        fired = self.next_states
        self.next_states = []
        return fired

    def commit(self, parent: State, child: State) -> None:
        """Receive a new state. Subclasses call this first."""
        self.states.append(child)

    def evaluates(self, state: State) -> bool:
        """Return whether the value function is called for a state. Default: final states, or all if `compares`."""
        return self.compares or state.is_final

    def result(self) -> State | None:
        """Return the final state from which the agent continues: the first one of the highest value."""
        return max((state for state in self.states if state.is_final), key=value_of, default=None)


def value_of(state: State) -> float:
    """Return the value of a state: 0 without a value function, minus infinity after an error."""
    if state.error is not None:
        return float("-inf")
    return 0.0 if state.value is None else state.value


def best(states: Sequence[State], count: int) -> list[State]:
    """Return the states of the highest values; earlier ones first among equals."""
    return sorted(states, key=value_of, reverse=True)[:count]
