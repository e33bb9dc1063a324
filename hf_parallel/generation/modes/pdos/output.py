"""Output of the pdos mode: answers, their parallel blocks, and the cost of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.generation.outputs import ParallelOutput

SKELETON, BRANCHES, CONTINUATION = STAGES = ("skeleton", "branches", "continuation")
"""The stages: sequential text up to the end of a skeleton, its branches, their joining and the text that follows."""


@dataclass
class Branch:
    """A branch of a parallel block.

    Attributes
    ----------
    title : str
    prefix : list of int
        Tokens of its branch marker, title and title end.
    text : str
        Generated text, without what ended it.
    tokens : list of int
        All generated tokens, what ended it included.
    ended_by : str
        `marker` (a branch marker or the terminator), `stop` (one of `branch_stops`), `eos`, `criterion` or `budget`.
    """

    title: str
    prefix: list[int]
    text: str
    tokens: list[int]
    ended_by: str


@dataclass
class ParallelBlock:
    """A parallel block of an answer.

    Attributes
    ----------
    skeleton : str
        Its text as the model generated it.
    start, end : int
        Its tokens in the answer, branches joined.
    branches : list of Branch
    """

    skeleton: str
    start: int
    end: int
    branches: list[Branch]


@dataclass
class StageStats:
    """Cost of a stage, over all prompts of the call.

    Attributes
    ----------
    forward_passes : int
        Forward passes with a prompt in this stage; a pass may serve several stages.
    decoded_tokens : int
        Generated tokens.
    computed_again : int
        Tokens whose keys and values were computed a second time, at other positions or with another context.
    seconds : float
        Wall-clock time; that of a pass is divided among its stages in proportion to their tokens.
    """

    forward_passes: int = 0
    decoded_tokens: int = 0
    computed_again: int = 0
    seconds: float = 0.0


@dataclass
class PDOSOutput(ParallelOutput):
    """Answers, and how they were generated.

    Attributes
    ----------
    sequences : int64 [batch, length]
        Prompt and answer, branches joined.
    scores, logits : tuple of [batch, vocabulary], optional
        For each token of the answer those that it was sampled from; zeros for tokens that were not sampled.
    blocks : list of list of ParallelBlock
        Per prompt.
    transcripts : list of str
        The answers as text.
    fallback : list of (str or None)
        Per prompt why decoding became sequential; None: it did not.
    stages : dict of str to StageStats
        Cost of `skeleton`, `branches` and `continuation`.
    """

    blocks: list[list[ParallelBlock]] | None = None
    transcripts: list[str] | None = None
    fallback: list[str | None] | None = None
    stages: dict[str, StageStats] | None = None

    @property
    def skeletons(self) -> list[list[str]]:
        """Per prompt and block the skeleton as it was generated."""
        return [[block.skeleton for block in blocks] for blocks in self.blocks or ()]

    @property
    def titles(self) -> list[list[list[str]]]:
        """Per prompt and block the titles of its branches."""
        return [[[branch.title for branch in block.branches] for block in blocks] for blocks in self.blocks or ()]

    @property
    def branch_texts(self) -> list[list[list[str]]]:
        """Per prompt and block the texts of its branches."""
        return [[[branch.text for branch in block.branches] for block in blocks] for blocks in self.blocks or ()]

    def columns(self, prompt: int) -> list[str]:
        """Return the titles of the branches if there is one block."""
        titles = self.titles[prompt]
        return titles[0] if len(titles) == 1 else []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """Return the joined answer, and why decoding became sequential."""
        fields = (("Joined answer", self.transcripts), ("Decoded sequentially", self.fallback))
        return [(label, texts[prompt] or "") for label, texts in fields if texts and texts[prompt]]
