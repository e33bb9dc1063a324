"""BeamTree: blocks of the beams of a search after their prompts. Beams that share a past share its blocks.

Each beam writes to a block of its own, until several beams continue it: then they see the block and begin new ones. A
block that no beam sees any more is freed. Where one beam, or one branch, is left, its tokens move to the end of the
block before them, so that a past that all beams share is one block, however long the search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.batch import View
from hf_parallel.cache.pool import Block, Pool

CAPACITY = 8
"""Initial capacity of a block in tokens: most are soon freed, or moved to the end of another one."""


@dataclass(eq=False)
class BeamBranch:
    """A block of tokens after the tokens of `parent`. A branch without a parent is the end of a prompt."""

    view_of_prompt: View
    next_position: int  # after the prompt
    parent: BeamBranch | None = None
    block: Block | None = None
    children: dict[BeamBranch, None] = field(default_factory=dict)

    @property
    def view(self) -> list[Block]:
        """Blocks that a beam at its end sees."""
        blocks: list[Block] = []
        branch = self
        while branch.parent is not None:
            if branch.block is not None:
                blocks.append(branch.block)
            branch = branch.parent
        return [*self.view_of_prompt, *reversed(blocks)]

    @property
    def end(self) -> int:
        """Position of the token after its last one."""
        return self.next_position if self.block is None else self.block.base + self.block.length


class BeamTree:
    """The branches of the beams of one or more prompts, whose blocks are in a pool and belong to no prefix tree."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._leaves: dict[BeamBranch, None] = {}
        self._forked: list[Block] = []  # of the last call, from whose states the last pass has continued

    def advance(self, branches: Sequence[BeamBranch]) -> list[BeamBranch]:
        """Return the branches of the next beams, given the one that each continues: a prompt, or one of the last call.

        A branch that one beam continues stays; after one that several continue, each gets a new branch, without tokens
        yet. Branches that no beam continues are freed.
        """
        for block in self._forked:
            self.pool.forget_state(block)
        uses = Counter(branches)
        thinned: dict[BeamBranch, None] = {}
        for leaf in self._leaves:
            if leaf not in uses:
                thinned[self._free(leaf)] = None
        kept = [branch for branch in thinned if branch.block is not None and len(branch.children) == 1]
        self._merge_children(sorted(kept, key=lambda branch: branch.end))
        forking = {branch for branch, count in uses.items() if branch.block is None or count > 1}
        self._forked = [branch.block for branch in forking if branch.block is not None]
        num_new = sum(uses[branch] for branch in forking)
        blocks = iter(self.pool.new_blocks(num_new, CAPACITY))
        leaves = []
        for branch in branches:
            leaves.append(self._new_child(branch, next(blocks)) if branch in forking else branch)
        self._leaves = dict.fromkeys(leaves)
        return leaves

    @staticmethod
    def _new_child(parent: BeamBranch, block: Block) -> BeamBranch:
        block.base = parent.end
        child = BeamBranch(parent.view_of_prompt, parent.next_position, parent, block)
        parent.children[child] = None
        return child

    def _free(self, branch: BeamBranch) -> BeamBranch:
        """Free a branch without children, and those before it that have no others. Return the one before these."""
        while branch.parent is not None and not branch.children:
            if branch.block is not None:
                self.pool.free(branch.block)
                branch.block = None
            del branch.parent.children[branch]
            branch = branch.parent
        return branch

    def _merge_children(self, branches: Sequence[BeamBranch]) -> None:
        """Move the tokens of the only child of each branch to the end of its block; the child takes its place.

        `branches` are in the order of their positions: a child that is merged, too, has the block of its parent.
        """
        moves: list[tuple[Block, Block]] = []
        for branch in branches:
            (child,) = branch.children
            parent = branch.parent
            assert parent is not None, "prompts are not merged"
            assert branch.block is not None, "it was not freed"
            assert child.block is not None, "it was not freed"
            moves.append((child.block, branch.block))
            child.block = branch.block
            branch.block = None
            child.parent = parent
            del parent.children[branch]
            parent.children[child] = None
        if moves:
            self.pool.append_all(moves)
        for source, _ in moves:
            self.pool.free(source)
