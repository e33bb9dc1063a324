"""Blocks of a cache keep the tokens that were written to them, under any sequence of operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from small_cache import BYTES_PER_TOKEN, HEAD_DIM, KV_HEADS, append, assert_holds, new_cache, unrotated

from hf_parallel.cache import Block, BlockCache, Segment

# Random operations


class CacheMachine(RuleBasedStateMachine):
    """Random operations on a cache, compared with a dictionary of token lists."""

    blocks = Bundle("blocks")

    @initialize()
    def start(self) -> None:
        self.cache = new_cache()
        self.tokens: dict[Block, list[int]] = {}
        self.next = 0

    def fresh(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    @rule(target=blocks, count=st.integers(1, 4), capacity=st.integers(0, 9), base=st.integers(0, 50))
    def new_blocks(self, count: int, capacity: int, base: int) -> Any:
        blocks = self.cache.pool.new_blocks(count, capacity, base)
        self.tokens.update((block, []) for block in blocks)
        return multiple(*blocks)

    @rule(into=st.lists(blocks, min_size=1, max_size=4), data=st.data())
    def append(self, into: list[Block], data: st.DataObject) -> None:
        appended = [([block], self.fresh(data.draw(st.integers(1, 12)))) for block in dict.fromkeys(into)]
        append(self.cache, *appended)
        for (block,), tokens in appended:
            self.tokens[block] += tokens

    @rule(target=blocks, block=blocks, extra=st.integers(0, 5))
    def fork(self, block: Block, extra: int) -> Block:
        made = self.cache.pool.copy(block, extra)
        assert made.free_slots >= extra
        self.tokens[made] = list(self.tokens[block])
        return made

    @rule(target=blocks, block=blocks, data=st.data())
    def split(self, block: Block, data: st.DataObject) -> Any:
        if block.length < 2:
            return multiple()
        at = data.draw(st.integers(1, block.length - 1))
        tail = self.cache.pool.split(block, at)
        self.tokens[block], self.tokens[tail] = self.tokens[block][:at], self.tokens[block][at:]
        return tail

    @rule(target=blocks, block=consumes(blocks), data=st.data())
    def divide(self, block: Block, data: st.DataObject) -> Any:
        at = data.draw(st.integers(1, block.length + 1))
        head, tail = self.cache.pool.divide(block, at)
        tokens = self.tokens.pop(block)
        self.tokens[head], self.tokens[tail] = tokens[:at], tokens[at:]
        return multiple(head, tail)

    @rule(source=blocks, destination=blocks)
    def move(self, source: Block, destination: Block) -> None:
        if source is destination:
            with pytest.raises(ValueError, match="into itself"):
                self.cache.pool.move(source, destination)
            return
        self.cache.pool.move(source, destination)
        self.tokens[destination] += self.tokens[source]
        self.tokens[source] = []

    @rule(block=blocks, data=st.data())
    def truncate(self, block: Block, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, block.length))
        self.cache.pool.truncate(block, length)
        del self.tokens[block][length:]

    @rule(block=blocks, more=st.integers(0, 20))
    def reserve(self, block: Block, more: int) -> None:
        self.cache.pool.reserve([(block, block.length + more)])
        assert block.free_slots >= more

    @rule(into=st.lists(blocks, min_size=1, max_size=3))
    def roll_back(self, into: list[Block]) -> None:
        """A pass that fails after a layer has written its keys."""
        forward = self.cache.prepare([Segment([block], 3) for block in dict.fromkeys(into)])
        tokens = [-1] * forward.plan.num_queries
        self.cache.pool.arena.write(0, unrotated(tokens), unrotated(tokens, 1), forward.plan)
        self.cache.rollback()

    @rule(block=consumes(blocks))
    def free(self, block: Block) -> None:
        self.cache.pool.free(block)
        del self.tokens[block]
        with pytest.raises(ValueError, match="not .* a block of this cache"):
            self.cache.pool.free(block)

    @invariant()
    def blocks_hold_their_tokens(self) -> None:
        for block, tokens in self.tokens.items():
            assert_holds(self.cache, block, tokens)

    @invariant()
    def kv_bytes_counts_unique_tokens(self) -> None:
        if self.cache.pool.arena.layers:
            assert self.cache.kv_bytes == sum(map(len, self.tokens.values())) * BYTES_PER_TOKEN

    @invariant()
    def extents_do_not_overlap(self) -> None:
        extents = sorted({block.extent for block in self.tokens if block.extent.capacity}, key=lambda e: e.origin)
        ends = [extent.origin + extent.capacity for extent in extents]
        assert all(end <= extent.origin for end, extent in zip(ends, extents[1:], strict=False))
        assert not ends or ends[-1] <= self.cache.pool.arena.num_slots


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestRandomOperations = CacheMachine.TestCase
# Arena


def test_keys_of_another_model_raise() -> None:
    cache = new_cache()
    block = cache.pool.new_block()
    append(cache, ([block], [1]))
    plan = cache.prepare([Segment([block], 1)]).plan
    for other in (torch.zeros(KV_HEADS + 1, 1, HEAD_DIM).double(), torch.zeros(KV_HEADS, 1, HEAD_DIM)):
        with pytest.raises(ValueError, match="serves the model that filled it"):
            cache.pool.arena.write(0, other, other, plan)


# Blocks


@pytest.mark.parametrize("steps", [0, 1], ids=["first pass", "following step"])
def test_seeing_a_block_at_another_position_needs_the_rotary_embedding(steps: int) -> None:
    """One row sees the other: from the second token on, the block that it sees is at another position."""
    cache = BlockCache()
    first, second = cache.pool.new_blocks(2, 8)
    second.base = steps
    views = [[first], [first, second]]
    for _ in range(steps):
        append(cache, *((view, [1]) for view in views))
    with pytest.raises(ValueError, match="another position .* needs the rotary embedding"):
        append(cache, *((view, [2]) for view in views))
    assert (first.length, second.length) == (steps, steps)


# Passes


def test_two_segments_that_write_to_one_block_raise() -> None:
    cache = new_cache()
    shared, block = cache.pool.new_blocks(2)
    append(cache, ([shared], [1]), ([block], [2]))
    with pytest.raises(ValueError, match="write to one block"):
        cache.prepare([Segment([block], 1), Segment([shared, block], 1)])
    for write in (True, False):  # last tokens cannot be recomputed while others are appended
        with pytest.raises(ValueError, match="write to one block"):
            cache.prepare([Segment([block], 1, write=write), Segment([block], 1, write=not write)])
    assert block.length == 1
    cache.prepare([Segment([block], 1, write=False), Segment([block], 1, write=False)])
