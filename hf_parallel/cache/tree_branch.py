"""`TreeBranchCache`: a trunk, branches that share it, and branches joined into it (PDOS, section 3).

Prompts are a tree of shared prefixes; each answer adds a `Tree`. Every block except those that are being joined is
stored at its true positions, so nothing is rotated while branches are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.batch import next_position
from hf_parallel.cache.pool import Block
from hf_parallel.cache.shared_prefix import SharedPrefixCache

BRANCH_CAPACITY = 64
"""Maximum initial capacity of a branch in tokens. Attention reads branches of equal capacity in one batched call."""


@dataclass(eq=False)
class Tree:
    """Blocks of one answer."""

    prompt: list[Block]  # root to leaf
    trunk: Block  # the answer outside of branches, and the branches that have been moved into it
    branches: list[Block] = field(default_factory=list)  # being decoded, each directly after the trunk
    joining: list[Block] = field(default_factory=list)
    """Joined branches that are not moved yet, then the trunk's continuation: only the latter if it was detached."""

    @property
    def view(self) -> list[Block]:
        """Blocks that the next token of the trunk sees."""
        return [*self.prompt, self.trunk, *self.joining]

    def branch_view(self, block: Block) -> list[Block]:
        """Return the blocks that a branch sees: the prompt, the trunk and itself, but no other branch."""
        return [*self.prompt, self.trunk, block]


class TreeBranchCache(SharedPrefixCache):
    """Prompts, trunks and branches of a batch of answers."""

    def new_trunks(self, starts: Sequence[int], capacity: int) -> list[Block]:
        """Allocate a trunk for each prompt; `starts` are the lengths of the prompts."""
        trunks = self.pool.new_blocks(len(starts), capacity)
        for trunk, start in zip(trunks, starts, strict=True):
            trunk.base = start
        return trunks

    def detach(self, tree: Tree) -> None:
        """Let the trunk continue in a block of its own until `move_joined`, so that its state stays for `branch`."""
        tree.joining.append(self.pool.new_block(base=next_position(tree.view)))

    def branch(
        self, tree: Tree, length: int, count: int, pending: int = 0, expected_length: int = BRANCH_CAPACITY
    ) -> None:
        """Truncate the trunk to `length` tokens, delete its detached continuation and start `count` branches there.

        `pending` tokens will be appended to the trunk before the first tokens of the branches. `expected_length` is the
        expected average length of a branch in tokens; its storage grows if necessary.
        """
        for block in tree.joining:
            self.pool.free(block)
        tree.joining = []
        self.pool.truncate(tree.trunk, length)
        base = next_position(tree.view) + pending
        tree.branches = self.pool.new_blocks(count, min(expected_length, BRANCH_CAPACITY), base)

    def join(self, tree: Tree, kept: int, pending: int = 0) -> None:
        """Append the first `kept` branches to the trunk in order, and delete the others.

        Later tokens of the trunk attend to them at their positions in it; `move_joined` moves them there. The trunk
        continues in a new empty block, after `pending` tokens that will still be appended to the kept branches.
        """
        for block in tree.branches[kept:]:
            self.pool.free(block)
        tree.joining, tree.branches = tree.branches[:kept], []
        tree.joining.append(self.pool.new_block(base=next_position(tree.view) + pending))

    def move_joined(self, tree: Tree) -> None:
        """Move the joined branches into the trunk, with keys rotated to their positions there."""
        for block in tree.joining:
            self.pool.move(block, tree.trunk)
            self.pool.free(block)
        tree.joining = []
