"""BeamSearch: continues the best unfinished paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import best
from hf_parallel.agents.supervisors.rounds import RoundSearch


@dataclass
class BeamSearch(RoundSearch):
    """Beam search over steps (Snell et al., "Scaling LLM Test-Time Compute Optimally", 2024, section 5.2).

    The first choice gets `width * expand` completions. Of all new states, the `width` of the highest values are kept,
    and each gets `expand` completions at its next choice. A path that has ended keeps its place as long as it is among
    the best; the search ends when all of them have. See `RoundSearch` for states that fail.

    Parameters
    ----------
    width : int
        Number of paths that are kept.
    expand : int
        Completions of each choice.
    value : callable
        Value of a state, of unfinished paths as well.
    """

    width: int
    expand: int
    counts: ClassVar[tuple[str, ...]] = ("width", "expand")

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self.next_states = [root] * (self.width * self.expand)

    def choose(self, children: list[State]) -> list[State]:
        """Return the unfinished states among the best."""
        ended = [state for state in self.states if state.is_final]
        beam = best([*ended, *(state for state in children if state.is_choice)], self.width)
        return [state for state in beam if state.is_choice for _ in range(self.expand)]
