"""Stages of a call with branches, and their cost."""

from __future__ import annotations

from dataclasses import dataclass

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
