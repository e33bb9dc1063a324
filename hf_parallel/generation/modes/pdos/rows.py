"""Rows of the pdos mode: an answer's trunk, and the branches of its open block (PDOS, section 3)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hf_parallel.cache import Block
from hf_parallel.cache.tree_branch import Tree
from hf_parallel.generation.modes.pdos.output import BRANCHES, SKELETON, ParallelBlock
from hf_parallel.generation.modes.pdos.parser import BlockFormat, SkeletonParser
from hf_parallel.generation.modes.pdos.token_text import WHITESPACE, Token, ids
from hf_parallel.generation.rows import PassInputs, PendingWrites, Row


class TrunkRow(Row):
    """One answer: its sequential text, and the blocks in it.

    Attributes
    ----------
    tokens : list of Token
        The answer so far: joined blocks, and the text that follows them.
    parser : SkeletonParser
        Has parsed the tokens from `parsed_from` on.
    num_samples : int
        Number of tokens that were sampled.
    branches : list of BranchRow
        Those of the open block; the trunk pauses meanwhile.
    branch_budget : int
        Tokens that the branches may still generate in all.
    skeleton, terminator : str, list of Token
        Text of the open block as it was generated, and the tokens that close it.
    fallback : str, optional
        Why decoding has become sequential.
    num_streamed : int
        Number of tokens that have been streamed.
    """

    def __init__(self, index: int, tree: Tree, fmt: BlockFormat) -> None:
        super().__init__(index, tree.view)
        self.tree, self.output_row = tree, index
        self.tokens: list[Token] = []
        self.blocks: list[ParallelBlock] = []
        self.branches: list[BranchRow] = []
        self.parser, self.parsed_from = SkeletonParser(fmt), 0
        self.num_samples = self.branch_budget = self.num_streamed = 0
        self.skeleton = ""
        self.terminator: list[Token] = []
        self.fallback: str | None = None
        self.finished = False
        self.stage = SKELETON
        self.pending_writes = PendingWrites()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def segments(self) -> PassInputs:
        """Return pending writes of joined branches and the trunk's own tokens; see `Row.segments`."""
        self.view = self.tree.view
        return [*self.take_pending_writes(), *super().segments()]

    def take_pending_writes(self) -> PassInputs:
        """Return the pending writes of all blocks of the answer, and clear them."""
        tree = self.tree
        return self.pending_writes.take(lambda block: tree.view if block is tree.trunk else tree.branch_view(block))


class BranchRow(Row):
    """One branch of a block, which sees the trunk and itself.

    Attributes
    ----------
    tokens : list of Token
        Generated tokens.
    text : bytes
        Their text.
    ended_by : str
        See `Branch`; empty while the branch is active.
    kept, joined : list of Token
        Generated tokens without what ended the branch, and the branch's tokens in the answer. Empty while it is active.
    """

    stage = BRANCHES

    def __init__(self, trunk: TrunkRow, index: int, output_row: int, block: Block, title: str, prefix: list[Token]):
        super().__init__(index, trunk.tree.branch_view(block), ids(prefix))
        self.trunk, self.output_row, self.block, self.title, self.prefix = trunk, output_row, block, title, prefix
        self.num_samples = trunk.num_samples
        self.tokens: list[Token] = []
        self.text = b""
        self.ended_by = ""
        self.kept: list[Token] = []
        self.joined: list[Token] = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_cached(self) -> int:
        """Number of joined tokens whose keys and values the branch's block holds."""
        sampled = next((i for i, token in enumerate(self.kept) if token.draw < 0), len(self.kept))
        return min(self.block.length, len(self.prefix) + sampled)

    @property
    def uncached(self) -> list[Token]:
        """Joined tokens without keys and values."""
        return self.joined[self.num_cached :]

    def find_end(self, ends: Sequence[tuple[bytes, int, str]], known: int) -> tuple[int | None, str]:
        """Return the length of the text and what ends it, if the bytes from `known` on complete an end.

        `ends` holds for each marker or stop its bytes, the number of these that are kept, and its name in `ended_by`.
        """
        found = []
        for end, kept, cause in ends:
            start = self.text.find(end, max(known - len(end) + 1, 0))
            while cause == "stop" and start >= 0 and not self.text[:start].strip(WHITESPACE):
                start = self.text.find(end, start + 1)
            if start >= 0:
                found.append((start + kept, cause))
        return min(found, default=(None, ""))

    def segments(self) -> PassInputs:
        """Return pending writes of the trunk and the branch's own tokens; see `Row.segments`."""
        return [*self.trunk.take_pending_writes(), *super().segments()]
