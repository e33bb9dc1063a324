"""Reasoning steps, and the output of a hogwild call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.generation.outputs import ALWAYS, ParallelOutput

COMMON = "common"
"""Name of the history that all workers see, and of the author of steps injected into it."""


@dataclass
class Step:
    """A reasoning step."""

    worker: int  # index among the workers of the prompt; -1: injected into the common history
    name: str  # of the worker; `common` for an injected step
    step: int  # index among the author's steps, from 1
    text: str
    tokens: list[int]  # of `text`, inserted ones included
    forward_pass: int | None = None  # index, from 1, of the decode pass that ended the step; None: unfinished


def join_steps(steps: Sequence[Step]) -> str:
    """Return the text of steps, separated by blank lines."""
    return "\n\n".join(step.text.rstrip() for step in steps)


@dataclass
class HogwildOutput(ParallelOutput):
    """Steps, texts and answers of the workers.

    Attributes
    ----------
    sequences : int64 [batch * num_workers, length]
        Prompt and text of each worker, step prefixes included, right-padded.
    scores, logits : tuple of [batch * num_workers, vocabulary], optional
        One entry per generated token. `sequences` also contains inserted tokens, so its columns do not match them.
    """

    item_names: ClassVar[Mapping[str, str]] = {
        "transcripts": "transcript",
        "answers": "answer",
        "conclusions": "conclusion",
    }

    history: list[list[Step]] = ALWAYS
    """Finished steps in the order in which they ended, followed by unfinished ones."""
    texts: list[str] = ALWAYS
    """Text of each worker, `batch * num_workers` of them."""
    transcripts: list[str] = ALWAYS
    """Text of `history`, one string per prompt."""
    answers: list[str | None] = ALWAYS
    """Final answer per prompt."""
    conclusions: list[str] = ALWAYS
    """Text of the early finisher per prompt, starting with `finisher_prompt`; empty if it did not run."""
    names: list[list[str]] = ALWAYS
    """Names of the workers."""

    def columns(self, prompt: int) -> list[str]:
        return list(self.names[prompt])

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        fields: dict[str, Sequence[str | None]] = {
            "Answer": self.answers,
            "Written by a reader of everything": self.conclusions,
        }
        notes = []
        for label, texts in fields.items():
            text = texts[prompt]
            if text:
                notes.append((label, text))
        return notes
