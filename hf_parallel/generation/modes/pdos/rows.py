"""Rows of the pdos mode: an answer's trunk, and the branches of its open block (PDOS, section 3)."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

import torch

from hf_parallel.cache import Block, View
from hf_parallel.cache.tree_branch import Tree
from hf_parallel.generation.log_probs import padded_log_probs, spread
from hf_parallel.generation.modes.pdos.output import BRANCHES, SKELETON, ParallelBlock
from hf_parallel.generation.modes.pdos.parser import BlockFormat, SkeletonParser
from hf_parallel.generation.modes.pdos.token_text import WHITESPACE, Token, ids
from hf_parallel.generation.rows import PendingWrites, Row
from hf_parallel.generation.sampling import Sampler


class TrunkRow(Row):
    """One answer: its sequential text, and the blocks in it."""

    writes: PendingWrites  # of all blocks of the answer

    def __init__(self, index: int, tree: Tree, fmt: BlockFormat) -> None:
        super().__init__(index, tree.view)
        self.tree = tree
        self.tokens: list[Token] = []  # joined blocks, and the text that follows them
        self.blocks: list[ParallelBlock] = []
        self.branches: list[BranchRow] = []  # of the open block; the trunk pauses until they have ended
        self.branch_budget = 0  # tokens that the branches may still generate in all
        self.parser, self.parsed_from = SkeletonParser(fmt), 0  # index of the first token that the parser has parsed
        self.num_samples = 0
        self.num_streamed = 0
        self.skeleton = ""  # generated text of the open block
        self.terminator: list[Token] = []
        self.fallback: str | None = None  # why decoding has become sequential
        self.finished = False
        self.stage = SKELETON
        self.writes = PendingWrites(lambda block: tree.view if block is tree.trunk else tree.branch_view(block))
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def current_view(self) -> View:
        return self.tree.view


class BranchRow(Row):
    """One branch of a block, which sees the trunk and itself."""

    stage = BRANCHES

    def __init__(self, trunk: TrunkRow, index: int, output_row: int, block: Block, title: str, prefix: list[Token]):
        super().__init__(index, trunk.tree.branch_view(block), ids(prefix), writes=trunk.writes)
        self.trunk, self.output_row, self.block, self.title, self.prefix = trunk, output_row, block, title, prefix
        self.num_samples = trunk.num_samples
        self.tokens: list[Token] = []  # all generated ones
        self.text = b""
        self.ended_by = ""  # see `Branch`; empty while the branch is active
        self.kept: list[Token] = []  # generated tokens without what ended the branch
        self.joined: list[Token] = []  # its tokens in the answer
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
        """Return the number of bytes to keep, and what ended the text; None if no end is complete after `known` bytes.

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


def answer_log_probs(sampler: Sampler, answers: Sequence[Sequence[Token]]) -> torch.Tensor | None:
    """Return the log-probabilities of the tokens of answers, float32 `[len(trunks), longest]`; NaN if not sampled."""
    if not sampler.returns_log_probs:
        return None
    drawn = spread(sampler.drawn, sampler.num_rows, by_draw=True).tolist()
    return padded_log_probs([[drawn[t.row][t.draw] if t.draw >= 0 else math.nan for t in answer] for answer in answers])


def aligned(samples: list[torch.Tensor] | None, answers: Sequence[Sequence[Token]]) -> list[torch.Tensor] | None:
    """Reorder `[rows, vocabulary]` per sample into `[batch, vocabulary]` per token; zeros for tokens not sampled."""
    if samples is None:
        return None
    found = []
    for position in range(max(map(len, answers))):
        values = samples[0].new_zeros(len(answers), samples[0].shape[-1])
        for index, tokens in enumerate(answers):
            token = tokens[position] if position < len(tokens) else Token(-1, b"")
            if token.draw >= 0:
                values[index] = samples[token.draw][token.row]
        found.append(values)
    return found
