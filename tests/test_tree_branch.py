"""TreeBranchCache: branches see the trunk and themselves, joined ones stand where they belong, nothing twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Features, Scene

from hf_parallel import TreeBranchCache
from hf_parallel.cache import Segment, view_length
from hf_parallel.cache.tree_branch import BRANCH_ROOM, Tree
from hf_parallel.kernels import RotarySpec
from hf_parallel.kernels.torch_attention import block_attention

pytestmark = pytest.mark.usefixtures("one_thread")

ROTARY = RotarySpec((1.0, 0.3), interleaved=False)


class Grove(Scene):
    """One attention layer over trees; what it gives is checked at every pass."""

    def __init__(self, rotary: RotarySpec | None = ROTARY, window: int | None = None, prompts: int = 1) -> None:
        super().__init__(Features(kv_heads=2, groups=2, rotary=rotary, window=window))
        self.cache: TreeBranchCache = TreeBranchCache({0: rotary})
        prompt = self.cache.new_block(7)
        self.step([Segment([prompt], 7)])
        trunks = self.cache.new_trunks([7] * prompts, room=16)
        self.trees = [Tree([prompt], trunk) for trunk in trunks]

    def write(self, *segments: Segment) -> None:
        self.step(segments)
        found = self.attend(block_attention, torch.float64)
        torch.testing.assert_close(found, self.truth(), rtol=0, atol=1e-11)

    def branch(self, tree: Tree, length: int, count: int, owed: int = 0) -> None:
        self.cache.branch(tree, length, count, owed)
        self.raw[tree.trunk] = self.content(tree.trunk)[:, :length]

    def settle(self, tree: Tree) -> None:
        content = torch.cat([self.content(block) for block in (tree.trunk, *tree.joining)], dim=1)
        self.cache.settle(tree)
        self.raw[tree.trunk] = content


def lengths(grove: Grove) -> int:
    return sum(block.length for block in grove.cache.blocks)


def test_branches_share_the_trunk_and_nothing_else() -> None:
    grove = Grove()
    (tree,) = grove.trees
    grove.write(Segment(tree.view, 9))
    grove.branch(tree, 4, count=3)
    views = [tree.branch_view(block) for block in tree.branches]
    assert [view[:-1] for view in views] == [tree.view] * 3
    assert [view_length(view) for view in views] == [block.base for block in tree.branches] == [7 + 4] * 3
    grove.write(*(Segment(view, n) for view, n in zip(views, (2, 5, 3), strict=True)))
    for _ in range(3):
        grove.write(*(Segment(view, 1) for view in views))
    assert lengths(grove) == 7 + 4 + (2 + 5 + 3) + 3 * 3


def test_branches_lie_evenly_in_memory() -> None:
    grove = Grove()
    grove.write(Segment(grove.trees[0].view, 3))
    grove.branch(grove.trees[0], 3, count=4)
    origins = [block.extent.origin for block in grove.trees[0].branches]
    assert origins == [origins[0] + i * BRANCH_ROOM for i in range(4)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_kept_branches_are_seen_behind_each_other_and_moved_there(kept: int, window: int | None) -> None:
    grove = Grove(window=window)
    (tree,) = grove.trees
    grove.write(Segment(tree.view, 3))
    grove.branch(tree, 3, count=3)
    views = [tree.branch_view(block) for block in tree.branches]
    grove.write(*(Segment(view, n) for view, n in zip(views, (4, 2, 6), strict=True)))
    owed = [Segment(view, n) for view, n in zip(views[:kept], (1, 2, 1), strict=False)]
    grove.cache.join(tree, kept, sum(segment.num_tokens for segment in owed))
    grove.write(*owed, Segment(tree.view, 4))  # what is owed is seen in the same pass
    seen = view_length(tree.view)
    grove.settle(tree)
    assert tree.view == [*tree.prompt, tree.trunk]
    assert view_length(tree.view) == seen
    assert len(grove.cache.blocks) == 2
    for _ in range(3):
        grove.write(Segment(tree.view, 1))
    assert lengths(grove) == view_length(tree.view)


def test_the_first_branch_is_joined_without_being_turned() -> None:
    grove = Grove(rotary=None)
    grove.cache.rotary = None  # a model whose keys cannot be turned
    (tree,) = grove.trees
    grove.write(Segment(tree.view, 3))
    grove.branch(tree, 3, count=2)
    grove.write(*(Segment(tree.branch_view(block), 3) for block in tree.branches))
    owed = Segment(tree.branch_view(tree.branches[0]), 2)
    grove.cache.join(tree, 1, owed.num_tokens)
    assert [block.base for block in tree.joining] == [7 + 3, 7 + 3 + 3 + 2]
    grove.write(owed, Segment(tree.view, 2))
    grove.settle(tree)
    grove.write(Segment(tree.view, 1))


def test_the_trunk_may_get_its_last_tokens_together_with_the_branches() -> None:
    grove = Grove()
    (tree,) = grove.trees
    grove.write(Segment(tree.view, 6))
    grove.branch(tree, 5, count=2, owed=2)
    assert [block.base for block in tree.branches] == [7 + 5 + 2] * 2
    grove.write(Segment(tree.view, 2), *(Segment(tree.branch_view(block), 3) for block in tree.branches))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_blocks_one_after_another_in_several_answers(data: st.DataObject) -> None:
    """Any number of blocks, kept branches and lengths; every pass equals attention over all tokens spelled out."""

    def few() -> int:
        return data.draw(st.integers(1, 4))

    grove = Grove(prompts=2)
    for tree in grove.trees:
        grove.write(Segment(tree.view, few()))
    for _ in range(few()):
        tree, other = data.draw(st.permutations(grove.trees))
        count = few()
        grove.branch(tree, data.draw(st.integers(0, tree.trunk.length)), count)
        writing = [Segment(tree.branch_view(block), few()) for block in tree.branches]
        grove.write(*writing, Segment(other.view, 1))
        grove.cache.join(tree, data.draw(st.integers(0, count)))
        grove.write(Segment(tree.view, few()), Segment(other.view, 1))
        grove.settle(tree)
    assert lengths(grove) == 7 + sum(tree.trunk.length for tree in grove.trees)
