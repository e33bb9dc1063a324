"""`TreeBranchCache`: answers over a tree of prompts, branches that share the text before them, and their joins.

PDOS (section 3) and models that fork by themselves. Every block is stored at the positions at which it was written, so
branches are decoded and joined without moving a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_parallel.cache.batch import View
from hf_parallel.cache.pool import Block
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node

BRANCH_CAPACITY = 64
"""Maximum initial capacity of a branch in tokens. Attention reads branches of equal capacity in one batched call."""


class TreeBranchCache(SharedPrefixCache):
    """Prompts, answers and branches of a batch."""

    def new_answers(self, prompts: Sequence[Node], capacity: int) -> list[list[Block]]:
        """Return the view of an answer to each prompt, which ends with a new block of `capacity` tokens."""
        blocks = self.pool.new_blocks(len(prompts), capacity)
        views = []
        for prompt, block in zip(prompts, blocks, strict=True):
            block.base = prompt.next_position
            views.append([*prompt.view, block])
        return views

    def branch(self, view: View, count: int, position: int, expected_length: int) -> list[list[Block]]:
        """Return the views of `count` branches after a view, at one position: each sees the view and itself.

        `expected_length`: tokens of a branch. Its storage grows if necessary.
        """
        blocks = self.pool.new_blocks(count, min(max(expected_length, 1), BRANCH_CAPACITY), position)
        return [[*view, block] for block in blocks]

    def join(
        self, view: View, branches: Sequence[tuple[Sequence[Block], int]], position: int, at_depth: bool
    ) -> list[Block]:
        """Return the view of the text after branches, with a new block at its end.

        `branches` are the blocks of each, without `view`, and its length in positions. With `at_depth` they stay at one
        position and the text follows the longest; otherwise it sees them one after the other, by rotation.
        """
        lengths = [length for _, length in branches]
        total = max(lengths) if at_depth else sum(lengths)
        joined = list(view)
        for index, (blocks, length) in enumerate(branches):
            if at_depth:
                is_last = index == len(branches) - 1
                blocks[-1].shift -= length - total if is_last else length
            joined += blocks
        joined.append(self.pool.new_block(base=position + total))
        return joined
