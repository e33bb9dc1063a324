"""TreeBranchCache: branches see the trunk and themselves; joined branches are moved to their positions."""

from __future__ import annotations

import pytest
import torch
from scenes import Features, Scene

from hf_parallel import TreeBranchCache
from hf_parallel.cache import Segment, view_length
from hf_parallel.cache.tree_branch import Tree
from hf_parallel.kernels import RotarySpec
from hf_parallel.kernels.torch_attention import TorchBackend

ROTARY = RotarySpec((1.0, 0.3), interleaved=False)


class Trees(Scene):
    """One attention layer over trees; its output is checked in every pass."""

    def __init__(self, rotary: RotarySpec | None = ROTARY, window: int | None = None, prompts: int = 1) -> None:
        super().__init__(Features(kv_heads=2, groups=2, rotary=rotary, window=window))
        self.cache: TreeBranchCache = TreeBranchCache({0: rotary})
        prompt = self.cache.pool.new_block(7)
        self.step([Segment([prompt], 7)])
        trunks = self.cache.new_trunks([7] * prompts, capacity=16)
        self.trees = [Tree([prompt], trunk) for trunk in trunks]

    def write(self, *segments: Segment) -> None:
        self.step(segments)
        found = self.attend(TorchBackend().attend, torch.float64)
        torch.testing.assert_close(found, self.truth(), rtol=0, atol=1e-11)

    def branch(self, tree: Tree, length: int, count: int, pending: int = 0) -> None:
        self.cache.branch(tree, length, count, pending)
        self.raw[tree.trunk] = self.content(tree.trunk)[:, :length]

    def move_joined(self, tree: Tree) -> None:
        content = torch.cat([self.content(block) for block in (tree.trunk, *tree.joining)], dim=1)
        self.cache.move_joined(tree)
        self.raw[tree.trunk] = content


def lengths(trees: Trees) -> int:
    return sum(block.length for block in trees.cache.pool.blocks)


def test_branches_share_only_the_trunk() -> None:
    trees = Trees()
    (tree,) = trees.trees
    trees.write(Segment(tree.view, 9))
    trees.branch(tree, 4, count=3)
    views = [tree.branch_view(block) for block in tree.branches]
    assert [view[:-1] for view in views] == [tree.view] * 3
    assert [view_length(view) for view in views] == [block.base for block in tree.branches] == [7 + 4] * 3
    trees.write(*(Segment(view, n) for view, n in zip(views, (2, 5, 3), strict=True)))
    for _ in range(3):
        trees.write(*(Segment(view, 1) for view in views))
    assert lengths(trees) == 7 + 4 + (2 + 5 + 3) + 3 * 3


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_joined_branches_are_seen_one_after_another_and_moved_there(kept: int, window: int | None) -> None:
    trees = Trees(window=window)
    (tree,) = trees.trees
    trees.write(Segment(tree.view, 3))
    trees.branch(tree, 3, count=3)
    views = [tree.branch_view(block) for block in tree.branches]
    trees.write(*(Segment(view, n) for view, n in zip(views, (4, 2, 6), strict=True)))
    pending = [Segment(view, n) for view, n in zip(views[:kept], (1, 2, 1), strict=False)]
    trees.cache.join(tree, kept, sum(segment.num_tokens for segment in pending))
    trees.write(*pending, Segment(tree.view, 4))  # pending tokens are seen in the same pass
    seen = view_length(tree.view)
    trees.move_joined(tree)
    assert tree.view == [*tree.prompt, tree.trunk]
    assert view_length(tree.view) == seen
    assert len(trees.cache.pool.blocks) == 2
    for _ in range(3):
        trees.write(Segment(tree.view, 1))
    assert lengths(trees) == view_length(tree.view)


def test_the_first_branch_is_joined_without_rotation() -> None:
    trees = Trees(rotary=None)
    trees.cache.rotary = None  # a model whose keys cannot be rotated
    (tree,) = trees.trees
    trees.write(Segment(tree.view, 3))
    trees.branch(tree, 3, count=2)
    trees.write(*(Segment(tree.branch_view(block), 3) for block in tree.branches))
    pending = Segment(tree.branch_view(tree.branches[0]), 2)
    trees.cache.join(tree, 1, pending.num_tokens)
    assert [block.base for block in tree.joining] == [7 + 3, 7 + 3 + 3 + 2]
    trees.write(pending, Segment(tree.view, 2))
    trees.move_joined(tree)
    trees.write(Segment(tree.view, 1))
