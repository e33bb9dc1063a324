"""SelfRefine: the model gives feedback on each completion and rewrites it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.agents.chat import Chat
from hf_parallel.agents.models import Settings
from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors.base import Fire
from hf_parallel.agents.supervisors.single import Single
from hf_parallel.generation.validation import check_text

FEEDBACK = "What is wrong with this answer? Give short feedback. If nothing is wrong, reply DONE."
REFINE = "Write the answer again, improved by this feedback. Reply with the answer alone."


@dataclass
class SelfRefine(Single):
    """Self-Refine (Madaan et al., "Self-Refine: Iterative Refinement with Self-Feedback", 2023).

    At each choice, the model drafts a completion, gives feedback on it and rewrites it, until the feedback contains
    `stop` or after `rounds` rounds. The agent receives only the last draft.

    Parameters
    ----------
    rounds : int
        Maximum number of rewrites.
    feedback : str
        User message that asks for feedback.
    refine : str
        User message that asks for the next draft.
    stop : str
        Feedback that contains this text accepts the draft.
    feedback_settings : dict, optional
        Settings of `Chat.gen` for the feedback. Default: those of the choice.
    """

    rounds: int
    feedback: str = FEEDBACK
    refine: str = REFINE
    stop: str = "DONE"
    feedback_settings: Settings | None = None
    counts: ClassVar[tuple[str, ...]] = ("rounds",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("feedback", "refine", "stop"):
            check_text(name, getattr(self, name))
        if not self.stop:
            raise ValueError(f"stop must be a string that is not empty, got {self.stop!r}")
        if self.feedback_settings is not None and not isinstance(self.feedback_settings, Mapping):
            raise ValueError(f"feedback_settings must be a dict, got {self.feedback_settings!r}")

    def select(self) -> Sequence[State | Fire]:
        """Return the new state, whose completion is refined."""
        return [Fire(state, self._complete) for state in super().select() if isinstance(state, State)]

    async def _complete(self, chat: Chat) -> str:
        draft = await chat.gen()
        for _ in range(self.rounds):
            chat.user(self.feedback)
            if self.stop in await chat.gen(**(self.feedback_settings or {})):
                break
            chat.user(self.refine)
            draft = await chat.gen()
        return draft
