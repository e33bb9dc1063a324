"""SelfConsistency: the most frequent answer of several runs of the agent."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import value_of
from hf_parallel.agents.supervisors.best_of_n import BestOfN
from hf_parallel.generation.modes import majority


def stripped(answer: object) -> str:
    """Return an answer as text, stripped."""
    return str(answer).strip()


@dataclass
class SelfConsistency(BestOfN):
    """Majority of n paths (Wang et al., "Self-Consistency Improves Chain of Thought Reasoning", 2022).

    The agent continues with the first path of the most frequent answer. A tie goes to the answer that occurs first.

    Parameters
    ----------
    n : int
        Number of paths.
    key : callable
        Returns the part of a yielded value that votes compare, such as a number in it. None: the path has no answer.
        Default: the value as text, stripped.
    value : callable, optional
        Weight of a path's vote. Default: 1.
    """

    key: Callable[[Any], Hashable] = stripped

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.key):
            raise ValueError(f"key must be a function of a yielded value, got {self.key!r}")

    def result(self) -> State | None:
        """Return the first path of the majority; without any answer, the first path."""
        ended = [state for state in self.states if state.is_final]
        weights = None if self.value is None else [value_of(state) for state in ended]
        winner, _ = majority([self.key(state.yielded) for state in ended], weights)
        return ended[winner] if ended else None
