"""BeamSearch: continue the best unfinished paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import best
from hf_parallel.agents.supervisors.rounds import RoundSearch


@dataclass
class BeamSearch(RoundSearch):
    """Beam search over steps (Snell et al., "Scaling LLM Test-Time Compute Optimally", 2024, section 5.2).

    The first choice gets `width * expand` completions. The `width` best states are kept, and each gets `expand`
    completions at its next choice. A finished path keeps its place in the beam while it is among the best. The search
    ends when all paths in the beam have finished. See `RoundSearch` for states that fail.

    Parameters
    ----------
    width : int
        Number of paths to keep.
    expand : int
        Completions per choice.
    value : callable
        Value of a state, also of an unfinished path.
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
