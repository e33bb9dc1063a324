"""Output of the pdos mode: answers, their parallel blocks, and the cost of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.generation.modes.branches.output import BranchOutput, StageStats
from hf_parallel.generation.outputs import ALWAYS


@dataclass
class Branch:
    """A branch of a parallel block."""

    title: str
    prefix: list[int]
    """Tokens of its branch marker, title and title end."""
    text: str
    """Generated text, without a marker or an end-of-sequence token that ended it; a stop is part of it."""
    tokens: list[int]
    """All generated tokens, including the tokens that ended it."""
    ended_by: str
    """`marker` (a branch marker or the terminator), `stop` (one of `branch_stops`), `eos`, `criterion` or `budget`."""


@dataclass
class ParallelBlock:
    """A parallel block of an answer."""

    skeleton: str
    """Its text as the model generated it."""
    start: int
    end: int
    """Slice of its tokens in the new tokens, branches joined."""
    branches: list[Branch]


@dataclass
class PDOSOutput(BranchOutput):
    """Answers, and how they were generated.

    Attributes
    ----------
    sequences : int64 [batch, length]
        Prompt and answer, branches joined.
    scores, logits : tuple of [batch, vocabulary], optional
        Values from which each token of the answer was sampled; zeros for tokens that were not sampled.
    """

    item_names: ClassVar[Mapping[str, str]] = {"transcripts": "transcript"}

    blocks: list[list[ParallelBlock]] = ALWAYS
    """Parallel blocks of each prompt's answer, in order."""
    fallback: list[str | None] = ALWAYS
    """Per prompt why decoding became sequential; None: it did not."""
    stages: dict[str, StageStats] = ALWAYS
    """Cost of `skeleton`, `branches` and `continuation`; with `after` also of `thinking`."""

    @property
    def skeletons(self) -> list[list[str]]:
        """Text of the skeleton of each block, per prompt."""
        return [[block.skeleton for block in blocks] for blocks in self.blocks]

    @property
    def titles(self) -> list[list[list[str]]]:
        """Per prompt and block the titles of its branches."""
        titles = []
        for blocks in self.blocks:
            titles.append([[branch.title for branch in block.branches] for block in blocks])
        return titles

    @property
    def branch_texts(self) -> list[list[list[str]]]:
        """Per prompt and block the texts of its branches."""
        texts = []
        for blocks in self.blocks:
            texts.append([[branch.text for branch in block.branches] for block in blocks])
        return texts

    def columns(self, prompt: int) -> list[str]:
        titles = self.titles[prompt]
        return titles[0] if len(titles) == 1 else []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        fields = (("Joined answer", self.transcripts), ("Decoded sequentially", self.fallback))
        return [(label, texts[prompt] or "") for label, texts in fields if texts[prompt]]
