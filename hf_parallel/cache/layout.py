"""Blocks and views, and their translation into an AttentionPlan (DESIGN.md section 2).

A block is a run of tokens stored once. A view is the ordered list of blocks that a row sees; the row appends to the
last one. Positions follow from the lengths alone, so no position is ever stored or updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_parallel.cache.arena import Extent
from hf_parallel.kernels import AttentionPlan, Increments, TokenRange, to_device


@dataclass(eq=False)
class Block:
    """A run of `length` tokens from index `first` of an extent. Its first key is rotated to position `base`."""

    extent: Extent
    base: int = 0
    first: int = 0
    length: int = 0

    @property
    def free_slots(self) -> int:
        """Number of tokens that can be appended without growing the extent."""
        return self.extent.capacity - self.first - self.length

    @property
    def tokens(self) -> TokenRange:
        """Location of the block's tokens in every layer's storage."""
        return self.extent.range(self.first, self.length)

    def __repr__(self) -> str:
        return f"Block(length={self.length}, base={self.base}, at={self.extent.origin}+{self.first})"


View = Sequence[Block]


@dataclass(frozen=True)
class Segment:
    """New tokens of one row in a forward pass: `num_tokens` tokens appended to the last block of `view`.

    With `write=False` they are the last tokens of that block, which are computed again (for their logits) and not
    stored.
    """

    view: View
    num_tokens: int
    write: bool = True


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass: its attention plan and the positions passed to the model.

    Attributes
    ----------
    plan : AttentionPlan
    position_ids : int64 [T]
        Position to which the model rotates each packed token: its position in the block that it is written to.
    segments : sequence of Segment
        In packed order, with their views at the time of the pass.
    blocks : sequence of Block
        All blocks of the views.
    states : list of tuple
        State of each block at the time of the pass, new tokens included; see `leads_to`.
    num_passes : int
        Number of consecutive passes that are computed as this one.
    """

    plan: AttentionPlan
    position_ids: torch.Tensor
    segments: Sequence[Segment]
    blocks: Sequence[Block]
    states: list[tuple[int, int, int, Extent]]
    num_passes: int = 1

    @property
    def last_tokens(self) -> list[int]:
        """Index of each segment's last packed token."""
        return (np.cumsum([segment.num_tokens for segment in self.segments]) - 1).tolist()

    @property
    def is_decode_step(self) -> bool:
        """Whether every row appends exactly one token."""
        return self.plan.increments is not None

    def leads_to(self, segments: Sequence[Segment]) -> bool:
        """Whether `segments` are the next decode step after this one: same rows, and no block has changed."""
        return (
            self.is_decode_step
            and len(segments) == len(self.segments)
            and self.states == _states(self.blocks)
            and all(
                new.num_tokens == 1 and new.write and tuple(new.view) == old.view and new.view[-1].free_slots
                for new, old in zip(segments, self.segments, strict=True)
            )
        )

    def next_step(self) -> ForwardPass:
        """Return the pass of the next decode step, whose new tokens the blocks' lengths already include."""
        return replace(
            self, plan=self.plan.next_step(), position_ids=self.position_ids + 1, states=_states(self.blocks)
        )


def _states(blocks: Iterable[Block]) -> list[tuple[int, int, int, Extent]]:
    return [(block.length, block.first, block.base, block.extent) for block in blocks]


def view_length(view: View) -> int:
    """Return the number of tokens in a view, which is also the position of the next one."""
    return sum(block.length for block in view)


def plan_pass(segments: Sequence[Segment], device: torch.device) -> ForwardPass:
    """Plan a forward pass, in O(new tokens + rows x blocks) integers.

    The blocks' lengths must include the new tokens: every row sees the new tokens of every other row.
    """
    planner = PassPlanner()
    planner.add(segments)
    return planner.build(device)


class PassPlanner:
    """Plans consecutive passes as one forward pass, in which each query sees the blocks as of its own pass.

    The keys that a query sees depend on the blocks' lengths only. Passes whose tokens are known are therefore added one
    by one while the lengths grow, and computed at once (DESIGN.md section 2).
    """

    def __init__(self) -> None:
        self._num_passes = self._num_tokens = 0
        self._segments: list[Segment] = []
        self._blocks: dict[int, tuple[Block, list[tuple[int, ...]]]] = {}  # with their rows of the table in `build`
        self._positions: list[np.ndarray] = []
        self._writes: list[tuple[np.ndarray, Block, np.ndarray]] = []  # (query, block, index in the block)
        self._decoding = False

    def add(self, segments: Sequence[Segment]) -> None:
        """Add the next pass. The blocks' lengths must include its new tokens, and no later ones."""
        self._num_passes += 1
        self._decoding = self._num_passes == 1 and all(s.write and s.num_tokens == 1 for s in segments)
        growing = {id(segment.view[-1]) for segment in segments} if self._decoding else set()
        for segment in segments:
            self._add(segment, growing)

    def _add(self, segment: Segment, growing: set[int]) -> None:
        """Add one row: for each block of its view, the row's rotation and position, and their increments per step."""
        target, n, offset = segment.view[-1], segment.num_tokens, self._num_tokens
        index = np.arange(target.length - n, target.length)  # of the new tokens in their block
        self._positions.append(target.base + index)
        if segment.write:
            self._writes.append((np.arange(offset, offset + n), target, index))
        before = segment.view[:-1]
        target_start = view_length(before)
        target_step = sum(id(block) in growing for block in before)
        position = target_start + target.length - n  # true position of the first new token
        start = start_step = 0
        for block in segment.view:
            grows = id(block) in growing
            if block.length:
                delta = (target_start - target.base) - (start - block.base)
                step = target_step - start_step
                rows = self._blocks.setdefault(id(block), (block, []))[1]
                rows.append((offset, n, delta, position - start, block.length, step, step + 1, grows))
            start += block.length
            start_step += grows
        self._segments.append(Segment(tuple(segment.view), n, segment.write))
        self._num_tokens += n

    def build(self, device: torch.device) -> ForwardPass:
        """Return the forward pass of all added passes, with the blocks at their current locations."""
        writes, blocks = self._writes, [block for block, _ in self._blocks.values()]
        table = np.array([row for _, rows in self._blocks.values() for row in rows], dtype=np.int64).reshape(-1, 8)
        counts = table[:, 1]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        query, delta, position, length = (np.repeat(table[:, i], counts) for i in (0, 2, 3, 4))
        position = position + within
        sizes = [sum(row[1] for row in rows) for _, rows in self._blocks.values()]
        plan = AttentionPlan(
            num_queries=self._num_tokens,
            block_origin=_ints(block.extent.origin for block in blocks),
            block_capacity=_ints(block.extent.capacity for block in blocks),
            block_first=_ints(block.first for block in blocks),
            block_pairs=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
            pair_query=query + within,
            pair_delta=delta,
            pair_position=position,
            pair_lo=np.zeros_like(position),
            pair_hi=np.minimum(length, position + 1),
            write_query=_concat(query for query, _, _ in writes),
            write_origin=_concat(np.full(len(query), block.extent.origin) for query, block, _ in writes),
            write_capacity=_concat(np.full(len(query), block.extent.capacity) for query, block, _ in writes),
            write_index=_concat(block.first + index for _, block, index in writes),
            increments=Increments(table[:, 5], table[:, 6], table[:, 7]) if self._decoding else None,
        )
        seen = tuple({id(block): block for segment in self._segments for block in segment.view}.values())
        return ForwardPass(
            plan,
            to_device(_concat(self._positions), device),
            tuple(self._segments),
            seen,
            _states(seen),
            self._num_passes,
        )


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _concat(arrays: Iterable[np.ndarray]) -> np.ndarray:
    arrays = list(arrays)
    return np.concatenate(arrays).astype(np.int64, copy=False) if arrays else np.empty(0, np.int64)
