"""Answer and Lane: an answer with branches, and the texts that are written at the same time in it."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_parallel.cache import Block, View
from hf_parallel.cache.logits_key import LogitsKey
from hf_parallel.cache.pool import Pool
from hf_parallel.generation.decoding.rows import PendingWrites, Row
from hf_parallel.generation.modes.branches.output import BRANCHES, SKELETON
from hf_parallel.generation.modes.branches.thinking import ThinkingEnd
from hf_parallel.generation.modes.branches.token_text import WHITESPACE, Token, ids, text_of
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.sampling.log_probs import padded_log_probs
from hf_parallel.generation.sampling.sampler import Sampler


@dataclass
class OpenFork:
    """A fork of a lane whose paths are written."""

    head: list[Token]
    """Tokens of the lane since its last fork, as its paths see them."""
    paths: list[tuple[str, list[Token]]]
    """Name and first tokens of each path."""
    joined: list[Token]
    """Tokens after the paths, which the model does not write."""
    source: str = ""
    """Text that the paths replace."""
    is_separate: bool = False
    """Whether the last path is the rest of the lane's text; both then begin with the last token before the fork."""


class Answer:
    """One answer: its budget, and KV writes pending in the blocks of all its lanes."""

    def __init__(self, output_row: int, budget: int) -> None:
        self.output_row = output_row
        self.left = budget  # tokens that may still be written, apart from text that is certain to follow
        self.num_paths = 0
        self.fallback: str | None = None
        self._views: dict[Block, View] = {}  # of pending writes
        self.writes = PendingWrites(self._views.__getitem__)

    def write(self, lane: Lane, tokens: Sequence[Token]) -> None:
        """Schedule tokens to be appended to the block of a lane."""
        self._views[lane.block] = lane.view
        self.writes.add(lane.block, ids(tokens))

    def free(self, pool: Pool, blocks: Sequence[Block]) -> None:
        """Delete blocks, and what is pending in them."""
        self.writes.pending = [write for write in self.writes.pending if write[0] not in blocks]
        for block in blocks:
            pool.free(block)


class Lane(Row):
    """A text that one row writes: that of an answer, or of a path. It pauses while the paths of a fork are written."""

    def __init__(
        self, answer: Answer, index: int, view: View, opening: Sequence[Token] = (), parent: Lane | None = None
    ) -> None:
        super().__init__(index, view, ids(opening), output_row=answer.output_row, writes=answer.writes)
        self.answer = answer
        self.parent = parent
        self.name = ""
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.is_rest = False  # whether it continues the text of its parent, which ends with it
        self.stage = SKELETON if parent is None else BRANCHES
        self.opening = list(opening)
        self.tokens = list(opening)
        self.num_shared = len(view) - 1  # blocks of the view that hold its prompt, or the text before its fork
        self.block_from = 0  # index of the first token of the last block of the view, computed or not
        self.text = text_of(opening)  # text since the last fork
        self.text_from = 0  # index of its first token, after the thinking
        self.num_samples: int = 0 if parent is None else parent.num_samples
        self.num_inherited = self.num_samples  # tokens that its parent has sampled before it began
        self.steps = 0  # of its critical path
        self.fresh: list[Token] = []  # tokens that were sampled last, of joined paths after a join
        self.before = LogitsKey()  # of what it sees before `own`
        self.context: LogitsKey | None = None  # of all that it saw when it last changed by more than a token
        self.num_computed = 0  # tokens of an ended path with keys and values
        self.open_fork: OpenFork | None = None
        self.paths: list[Lane] = []
        self.calls: list[Lane] = []  # paths with prompts of their own that have not been joined
        self.awaited: list[Lane] = []  # those of them for which it waits
        self.forks: list[Any] = []
        self.reader: Any = None  # of the text since the last fork
        self.thinking: ThinkingEnd | None = None  # while it writes text before the format
        self.thought = b""  # this text
        self.thought_tokens = 0  # whole tokens of it
        self.first_sample = 0  # number of tokens that were sampled before the format
        self.ended_by = ""  # empty while it is active
        self.sampled: list[int] = []  # all tokens that an ended path has generated
        self.kept = b""  # its text, without what ended it
        self.num_streamed = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._attached: tuple[View, int] | None = None  # view and `block_from` before `detach`

    @property
    def block(self) -> Block:
        """The block to which it appends."""
        return self.view[-1]

    @property
    def position(self) -> int:
        """Position of the token after its text."""
        return self.block.base + len(self.tokens) - self.block_from

    @property
    def own(self) -> list[Token]:
        """Tokens since the last fork."""
        return self.tokens[self.text_from :]

    @property
    def uncached(self) -> list[Token]:
        """Tokens whose keys and values are not computed yet."""
        return self.tokens[self.block_from + self.block.length :]

    @property
    def path(self) -> Lane | None:
        """The path whose text this lane writes, or None if it writes the answer's text."""
        return self.parent and (self.parent.path if self.is_rest else self)

    def see(self, blocks: Sequence[Block]) -> None:
        """Replace the blocks of the view before its own: more of them hold the same tokens, or they were computed."""
        self.view = [*blocks, *self.view[self.num_shared :]]
        if self._attached is not None:
            view, block_from = self._attached
            self._attached = [*blocks, *view[self.num_shared :]], block_from
        self.num_shared = len(blocks)

    def own_blocks(self) -> list[Block]:
        """Return a path's blocks after the fork."""
        return [] if self.parent is None else list(self.view[len(self.parent.view) :])

    def writing(self) -> list[Lane]:
        """Return the lanes that write at present, of this one and its paths."""
        if self.paths:
            return [row for path in self.paths for row in path.writing()]
        lanes = [] if self.ended_by or self.awaited else [self]
        for path in self.calls:
            lanes += path.writing()
        return lanes

    def append(self, tokens: Sequence[Token]) -> None:
        """Append tokens to the text, and make them pending."""
        self.tokens += tokens
        self.text += text_of(tokens)
        self.pending = ids(self.uncached)

    def replace(self, tokens: Sequence[Token], pool: Pool) -> int:
        """Replace the tokens since the last fork. Return how many of them stay."""
        same = 0
        for old, new in zip(self.own, tokens, strict=False):
            if old is not new:
                break
            same += 1
        if self.text_from + same < self.block_from:
            self._reattach(pool)
        length = self.text_from + same - self.block_from
        if length < self.block.length:
            pool.truncate(self.block, length)
            if not pool.continues(self.block, length):
                pool.truncate(self.block, 0)
        self.tokens[self.text_from :] = tokens
        self.text = text_of(tokens)
        self.context = None
        self.pending = ids(self.uncached)
        return same

    def detach(self, pool: Pool) -> None:
        """Continue in a block of its own, so that the state before it stays for `replace`."""
        if self._attached is None:
            self._attached = self.view, self.block_from
            block = pool.new_block(base=self.block.base + self.block.length)
            self.block_from += self.block.length
            self.view = [*self.view, block]

    def attach(self, pool: Pool) -> None:
        """Move what was written since `detach` to the block before."""
        if self._attached is not None:
            pool.move(self.view[-1], self.view[-2])
            self._reattach(pool)

    def _reattach(self, pool: Pool) -> None:
        assert self._attached is not None, "computed tokens before a fork are not replaced"
        pool.free(self.view[-1])
        (self.view, self.block_from) = self._attached
        self._attached = None

    def begin_format(self, num_after: int) -> None:
        """Begin the text that the mode reads, in its last `num_after` bytes. Their token belongs to it, too."""
        self.thinking = None
        self.thought = self.text[: len(self.text) - num_after]
        self.first_sample = self.num_samples
        count = len(self.own) - (num_after > 0)
        self.before = self.before.then(ids(self.own[:count]))
        self.text_from += count
        self.thought_tokens = self.text_from
        self.text = text_of(self.own)

    def continue_after(self, tokens: Sequence[Token], view: View, block_from: int) -> None:
        """Append tokens of joined paths, and continue in the last block of a view."""
        self.tokens += tokens
        self.view = view
        self.block_from = block_from
        self._attached = None
        self.text = b""
        self.text_from = len(self.tokens)
        self.paths = []
        self.open_fork = None
        self.context = None
        self.pending = ids(self.uncached)
        self.decoder.reset()

    def find_end(self, ends: Sequence[tuple[bytes, int, str]], known: int) -> tuple[int, str] | None:
        """Return the number of bytes to keep, and what ended the text; None if no end is complete after `known` bytes.

        `ends` holds for each marker or stop its bytes, the number of these that are kept, and its name in `ended_by`.
        """
        first = 0 if self.forks else len(text_of(self.opening))
        matches = []
        for end, num_kept, cause in ends:
            start = self.text.find(end, max(known - len(end) + 1, first))
            while cause == "stop" and start >= 0 and not self.text[first:start].strip(WHITESPACE):
                start = self.text.find(end, start + 1)
            if start >= 0:
                matches.append((start + num_kept, cause))
        return min(matches, default=None)


class Records:
    """Output of a mode: a record of each fork, and the fields that hold them."""

    def record(self, lane: Lane, start: int, end: int) -> Any:
        """Return the record of a fork whose paths become tokens `start` to `end` of the lane."""
        raise NotImplementedError

    def moved(self, forks: Sequence[Any], offset: int) -> list[Any]:
        """Return records of forks in a lane whose tokens begin `offset` tokens later."""
        raise NotImplementedError

    def output(self, roots: Sequence[Lane]) -> tuple[type[ParallelOutput], dict[str, Any]]:
        """Return the class of the output, and its fields of records."""
        raise NotImplementedError


def answer_log_probs(sampler: Sampler, answers: Sequence[Sequence[Token]]) -> torch.Tensor | None:
    """Return the log-probabilities of the tokens of answers, float32 `[answers, longest]`; NaN if not sampled."""
    if not sampler.returns_log_probs:
        return None
    drawn = sampler.log_probs_of_rows(by_draw=True).tolist()
    of_answers = []
    for answer in answers:
        values = [drawn[token.row][token.draw] if token.draw >= 0 else math.nan for token in answer]
        of_answers.append(values)
    return padded_log_probs(of_answers)


def aligned(samples: list[torch.Tensor] | None, answers: Sequence[Sequence[Token]]) -> list[torch.Tensor] | None:
    """Reorder `[rows, vocabulary]` per sample into `[batch, vocabulary]` per token; zeros for tokens not sampled."""
    if samples is None:
        return None
    of_tokens = []
    for position in range(max(map(len, answers))):
        values = samples[0].new_zeros(len(answers), samples[0].shape[-1])
        for index, tokens in enumerate(answers):
            if position < len(tokens) and tokens[position].draw >= 0:
                token = tokens[position]
                values[index] = samples[token.draw][token.row]
        of_tokens.append(values)
    return of_tokens
