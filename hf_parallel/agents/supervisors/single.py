"""Single: one run of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Supervisor


@dataclass(kw_only=True)
class Single(Supervisor):
    """Continues each state once."""

    continues_once: ClassVar[bool] = True

    def init(self, root: State) -> None:
        """Begin a search."""
        super().init(root)
        self.next_states = [root]

    def commit(self, parent: State, child: State) -> None:
        """Continue with the new state."""
        super().commit(parent, child)
        if child.is_choice:
            self.next_states.append(child)
