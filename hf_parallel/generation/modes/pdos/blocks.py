"""What the rows of the pdos mode share: tokens and where they come from, records of blocks, what stages cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hf_parallel.cache.tree_branch import TreeBranchCache
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.pdos.token_text import WHITESPACE, Vocabulary
from hf_parallel.generation.streaming import FinalTokens

if TYPE_CHECKING:
    from hf_parallel.generation.modes.pdos.config import PDOSConfig

SKELETON, BRANCHES, CONTINUATION = STAGES = ("skeleton", "branches", "continuation")
"""The three stages: sequential text up to the end of a skeleton, branches, their joining and what follows it."""


class Token(NamedTuple):
    """A token of an answer, and the how manieth draw of which row it is; -1: it was given."""

    id: int
    draw: int = -1
    row: int = -1


@dataclass
class Branch:
    """What a branch wrote.

    Attributes
    ----------
    title : str
    prefix : list of int
        Tokens that the branch began with behind the trunk: branch marker, title, title end.
    text : str
        What it wrote, without what ended it.
    tokens : list of int
        All that it generated, what ended it included.
    ended_by : str
        `marker` (that of a branch, or the terminator), `stop` (one of `branch_stops`), `eos`, `criterion` or `budget`.
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
        Which tokens of the answer it is, joined.
    branches : list of Branch
    """

    skeleton: str
    start: int
    end: int
    branches: list[Branch]


@dataclass
class StageStats:
    """What a stage cost, over all prompts of the call.

    Attributes
    ----------
    forward_passes : int
        Those in which a prompt was in this stage; one pass may serve several.
    decoded_tokens : int
        Tokens that were generated.
    computed_again : int
        Tokens whose keys and values had been computed, and were once more at another place or in another sight.
    seconds : float
        Wall-clock time, shared out between the stages of a pass by the tokens that they brought.
    """

    forward_passes: int = 0
    decoded_tokens: int = 0
    computed_again: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Run:
    """What the rows of a call share."""

    config: PDOSConfig
    call: GenerationCall
    loop: DecodeLoop
    cache: TreeBranchCache
    vocabulary: Vocabulary
    stream: FinalTokens
    separator: list[Token]
    opening: list[Token]
    stages: dict[str, StageStats] = field(default_factory=lambda: {name: StageStats() for name in STAGES})

    def text(self, token: int) -> bytes:
        """What a generated token adds to a text: the end of one adds nothing."""
        return b"" if token in self.call.eos_token_ids else self.vocabulary.texts[token]

    def read(self, tokens: Iterable[Token]) -> bytes:
        """The text of several tokens."""
        return b"".join(self.text(token.id) for token in tokens)

    def transcript(self, tokens: Iterable[Token]) -> str:
        """An answer as its tokenizer writes it, without the tokens that end it."""
        written = [token.id for token in tokens if token.id not in self.call.eos_token_ids]
        return self.call.tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def spell(self, text: bytes) -> list[Token] | None:
        """A text of the mode's own as tokens."""
        tokens = self.vocabulary.spell(text)
        return None if tokens is None else [Token(token) for token in tokens]

    def cut(self, tokens: Sequence[Token], begin: int, end: int | None = None) -> list[Token]:
        """The tokens of the bytes from `begin` to `end`; those across a border give way to what spells their part.

        Raises
        ------
        ValueError
            If nothing does.
        """
        found: list[Token] = []
        at = 0
        for token in tokens:
            text = self.text(token.id)
            part = text[max(begin - at, 0) : None if end is None else max(end - at, 0)]
            inside = at >= begin and (end is None or max(at + len(text), at + 1) <= end)
            if inside and part == text:
                found.append(token)
            elif part:
                spelled = self.spell(part)
                if spelled is None:
                    raise ValueError(f"no token stands for a part of {text.decode(errors='replace')!r}")
                found += spelled
            at += len(text)
        return found

    def widen(self, tokens: Sequence[Token], begin: int, end: int) -> tuple[int, int]:
        """Borders moved outwards to those of tokens, where only whitespace lies between."""
        at = 0
        for token in tokens:
            text = self.text(token.id)
            after = at + len(text)
            if at < begin < after and not text[: begin - at].strip(WHITESPACE):
                begin = at
            if at < end < after and not text[end - at :].strip(WHITESPACE):
                end = after
            at = after
        return begin, end


def ids(tokens: Iterable[Token]) -> list[int]:
    """The tokens alone."""
    return [token.id for token in tokens]
