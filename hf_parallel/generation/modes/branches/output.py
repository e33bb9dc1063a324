"""Output of modes with branches: the thinking before an answer, and the stages of a call with their cost."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.generation.outputs import ALWAYS, ParallelOutput

THINKING = "thinking"
"""Stage of a call with the setting `after`: the text before the format."""
SKELETON, BRANCHES, CONTINUATION = STAGES = ("skeleton", "branches", "continuation")
"""Stages: sequential text up to the start of branches; the branches; joining them, and the text after them."""


@dataclass
class StageStats:
    """Cost of a stage, over all prompts of the call."""

    forward_passes: int = 0
    """Forward passes with rows in this stage; a pass may serve several stages."""
    decoded_tokens: int = 0
    """Generated tokens."""
    computed_again: int = 0
    """Tokens whose keys and values were computed a second time, at other positions or with another context."""
    seconds: float = 0.0
    """Wall-clock time. A pass that serves several stages is divided in proportion to their tokens."""


@dataclass
class BranchOutput(ParallelOutput):
    """Output of a mode whose answers may follow a thinking; see the setting `after`."""

    transcripts: list[str] = ALWAYS
    """The texts of the answers, the thinking included."""
    thinking: list[str | None] = ALWAYS
    """The part of each transcript before the format begins, up to and including `after`; None without `after`."""

    thinking_tokens: list[int] = ALWAYS
    """Number of new tokens of the thinking. A token that holds its end and more is not counted."""

    @property
    def without_thinking(self) -> list[str]:
        """The transcripts without the thinking."""
        texts = []
        for transcript, thinking in zip(self.transcripts, self.thinking, strict=True):
            texts.append(transcript[len(thinking or "") :])
        return texts
