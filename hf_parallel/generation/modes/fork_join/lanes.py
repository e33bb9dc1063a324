"""Answer and Lane: an answer of the fork_join mode, and the texts that are written at the same time in it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hf_parallel.cache import Block, View
from hf_parallel.cache.pool import Pool
from hf_parallel.generation.modes.fork_join.output import Fork, Path
from hf_parallel.generation.modes.pdos.token_text import Token, ids, text_of
from hf_parallel.generation.rows import PendingWrites, Row


class Answer:
    """One answer: its budget, and KV writes pending in the blocks of all its lanes."""

    def __init__(self, output_row: int, budget: int) -> None:
        self.output_row = output_row
        self.left = budget  # tokens that may still be written, apart from text that is certain to follow
        self.num_paths = 0
        self.fallback: str | None = None
        self.views: dict[Block, View] = {}  # of each block's tokens
        self.writes = PendingWrites(lambda block: self.views[block])

    def free(self, pool: Pool, blocks: Sequence[Block]) -> None:
        """Delete blocks, and what is pending in them."""
        self.writes.pending = [write for write in self.writes.pending if write[0] not in blocks]
        for block in blocks:
            del self.views[block]
            pool.free(block)


class Lane(Row):
    """A text that one row writes: that of an answer, or of a path. It pauses while the paths of a fork are written."""

    def __init__(
        self, answer: Answer, index: int, view: View, opening: Sequence[Token] = (), parent: Lane | None = None
    ) -> None:
        number = answer.num_paths if parent else 0
        super().__init__(index, view, ids(opening), output_row=answer.output_row, writes=answer.writes)
        self.answer, self.parent, self.number = answer, parent, str(number)
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens: list[Token] = list(opening)
        self.num_in_block = len(opening)  # tokens that belong to the last block of the view, computed or not
        self.text, self.text_from = text_of(opening), 0  # text since the last fork, and the index of its first token
        self.table_from = 0  # length of its row in the table before the first token of this text
        self.num_samples = self.steps = 0  # `steps`: of its critical path
        self.paths: list[Lane] = []  # of the open fork
        self.forks: list[Fork] = []
        self.ended_by = ""  # see `Path`; empty while it is active
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        answer.views[view[-1]] = view

    @property
    def block(self) -> Block:
        """The block to which it appends."""
        return self.view[-1]

    @property
    def position(self) -> int:
        """Position of the token after its text."""
        return self.block.base + self.num_in_block

    @property
    def uncached(self) -> list[Token]:
        """Tokens whose keys and values are not computed yet."""
        return self.tokens[len(self.tokens) - (self.num_in_block - self.block.length) :]

    def own_blocks(self, trunk: Lane) -> list[Block]:
        """Return the blocks of a path that follow those of the lane that forked."""
        return list(self.view[len(trunk.view) :])

    def writing(self) -> list[Lane]:
        """Return the lanes that write at present, of this one and its paths."""
        if self.paths:
            return [row for path in self.paths for row in path.writing()]
        return [] if self.ended_by else [self]

    def append(self, tokens: Sequence[Token]) -> None:
        """Append tokens to the text."""
        self.tokens += tokens
        self.num_in_block += len(tokens)
        self.text += text_of(tokens)

    def replace(self, tokens: list[Token]) -> None:
        """Replace the tokens since the last fork, which differ in uncomputed ones only."""
        before = len(self.tokens)
        self.tokens = self.tokens[: self.text_from] + tokens
        self.num_in_block += len(self.tokens) - before
        self.text = text_of(tokens)

    def max_split(self, end: int) -> int:
        """Return the maximum number of further tokens if the text is cut at byte `end`, within its last token."""
        return len(self.tokens[-1].text) if end < len(self.text) else 0

    def continue_in(self, blocks: Sequence[Block], block: Block, pending: Sequence[Token]) -> None:
        """Continue after joined blocks in a new one, with tokens that are not computed yet."""
        self.view = [*self.view, *blocks, block]
        self.answer.views[block] = self.view
        self.pending, self.num_in_block = ids(pending), len(pending)
        self.text, self.text_from = b"", len(self.tokens)

    def record(self) -> Path:
        """Return the path as the output has it."""
        text = text_of(self.tokens).decode(errors="replace")
        return Path(self.number, text, ids(self.tokens), self.ended_by, self.forks)
