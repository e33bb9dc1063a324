"""Supervisors that run whole paths: a single one, or several that are ranked or vote."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Supervisor, value_of
from hf_parallel.generation.modes import majority


@dataclass(kw_only=True)
class Single(Supervisor):
    """Continues each state once."""

    continues_once: ClassVar[bool] = True

    def init(self, root: State) -> None:
        super().init(root)
        self.next_states = [root]

    def commit(self, parent: State, child: State) -> None:
        super().commit(parent, child)
        if child.is_choice:
            self.next_states.append(child)


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
        super().init(root)
        self.next_states = [root] * self.n


def _stripped(answer: object) -> str:
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

    key: Callable[[Any], Hashable] = _stripped

    def result(self) -> State | None:
        """Return the first path of the majority; without any answer, the first path."""
        ended = [state for state in self.states if state.is_final]
        if not ended:
            return None
        weights = None if self.value is None else [value_of(state) for state in ended]
        keys = [self.key(state.yielded) for state in ended]
        winner, _ = majority(keys, weights)
        return ended[winner]
