"""TreeBranchCache: a trunk, branches that share it, and branches joined back into it (PDOS, section 3).

Prompts are a tree of shared prefixes; on it stands one `Tree` per answer. Every block but those that wait to be joined
stands at its true position, so that nothing is turned while branches are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.layout import Block, view_length
from hf_parallel.cache.shared_prefix import SharedPrefixCache

BRANCH_ROOM = 64
"""Tokens that a branch has room for at first; equal extents let the branches be read in one call."""


@dataclass(eq=False)
class Tree:
    """The blocks of one answer.

    Attributes
    ----------
    prompt : list of Block
        The prompt, root to leaf.
    trunk : Block
        The answer outside of branches, and the branches joined to it.
    branches : list of Block
        What is being written side by side behind the trunk.
    joining : list of Block
        Branches that stand in the trunk already, one behind the other, but have not been moved there.
    """

    prompt: list[Block]
    trunk: Block
    branches: list[Block] = field(default_factory=list)
    joining: list[Block] = field(default_factory=list)

    @property
    def view(self) -> list[Block]:
        """What the next token of the trunk sees."""
        return [*self.prompt, self.trunk, *self.joining]

    def branch_view(self, block: Block) -> list[Block]:
        """What a branch sees: the trunk and itself, whichever branches there are."""
        return [*self.prompt, self.trunk, block]


class TreeBranchCache(SharedPrefixCache):
    """Prompts, trunks and branches of a batch of answers."""

    def new_trunks(self, starts: Sequence[int], room: int) -> list[Block]:
        """Make the trunks of answers behind prompts of the given lengths."""
        trunks = self.new_blocks(len(starts), room)
        for trunk, start in zip(trunks, starts, strict=True):
            trunk.base = start
        return trunks

    def branch(self, tree: Tree, length: int, count: int, owed: int = 0, room: int = BRANCH_ROOM) -> None:
        """Cut the trunk down to `length` tokens and let branches grow there.

        Parameters
        ----------
        tree : Tree
        length : int
            Tokens of the trunk that stay.
        count : int
            Branches.
        owed : int
            Tokens that the trunk will get before the branches have any.
        room : int
            Tokens that each branch will have on average, if that is known.
        """
        self.truncate(tree.trunk, length)
        tree.branches = self.new_blocks(count, min(room, BRANCH_ROOM), base=view_length(tree.view) + owed)

    def join(self, tree: Tree, kept: int, owed: int = 0) -> None:
        """Put the first `kept` branches behind the trunk, in order, and forget the others.

        What they hold is seen at its place in the trunk from now on; `settle` moves it there. Behind them stands an
        empty block, where the trunk goes on.

        Parameters
        ----------
        tree : Tree
        kept : int
        owed : int
            Tokens that the kept branches will get before the trunk goes on.
        """
        for block in tree.branches[kept:]:
            self.free(block)
        tree.joining, tree.branches = tree.branches[:kept], []
        tree.joining.append(self.new_block(base=view_length(tree.view) + owed))

    def settle(self, tree: Tree) -> None:
        """Move what stands behind the trunk into it, keys turned to their places."""
        for block in tree.joining:
            self.move(block, tree.trunk)
            self.free(block)
        tree.joining = []
