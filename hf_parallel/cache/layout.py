"""Blocks, views, and the step from them to an AttentionPlan (DESIGN.md section 2).

A block is a run of tokens stored once; a view is the ordered list of blocks that a row sees, the last one being
where it writes. Positions follow from the lengths alone, so that no position is ever stored or updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_parallel.cache.arena import Extent
from hf_parallel.kernels import AttentionPlan, Growth, to_device


@dataclass(eq=False)
class Block:
    """A run of `length` tokens at row `first` of an extent, the first key stored at rotary position `base`."""

    extent: Extent
    base: int = 0
    first: int = 0
    length: int = 0

    @property
    def room(self) -> int:
        """Tokens that fit behind those that it has."""
        return self.extent.capacity - self.first - self.length

    def __repr__(self) -> str:
        return f"Block(length={self.length}, base={self.base}, at={self.extent.origin}+{self.first})"


View = Sequence[Block]


@dataclass(frozen=True)
class Segment:
    """What one row brings to a forward pass: `num_tokens` new tokens behind the last block of `view`.

    With `write=False` the tokens are the last ones that the block holds already: they are asked again (for their
    logits) and stored nowhere.
    """

    view: View
    num_tokens: int
    write: bool = True


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass: the plan of its attention and the positions that the model is given.

    `position_ids` is `int64 [T]`: where each packed token is rotated to by the model, which is its place in the
    block that it is written to. `segments` are in packed order, their views as they were when the pass was laid out.
    `blocks` are all that they see; `lengths` (new tokens counted) and `places` are where those stood then. It may stand
    for `num_passes` that follow each other in time.
    """

    plan: AttentionPlan
    position_ids: torch.Tensor
    segments: Sequence[Segment]
    blocks: Sequence[Block]
    lengths: list[int]
    places: list[tuple[Extent, int, int]]
    num_passes: int = 1

    @property
    def last_tokens(self) -> list[int]:
        """Index of each segment's last packed token."""
        return (np.cumsum([segment.num_tokens for segment in self.segments]) - 1).tolist()

    @property
    def is_decode_step(self) -> bool:
        """Whether every row brings one token of its own."""
        return self.plan.growth is not None

    def leads_to(self, segments: Sequence[Segment]) -> bool:
        """Whether `segments` are the next decode step after this one, with nothing changed but the new tokens."""
        return (
            self.is_decode_step
            and len(segments) == len(self.segments)
            and self.lengths == [block.length for block in self.blocks]
            and self.places == [_place(block) for block in self.blocks]
            and all(
                new.num_tokens == 1 and new.write and tuple(new.view) == old.view and new.view[-1].room
                for new, old in zip(segments, self.segments, strict=True)
            )
        )

    def next_step(self) -> ForwardPass:
        """The pass of the next decode step: the same rows bring one more token each, which their blocks count."""
        lengths = [block.length for block in self.blocks]
        return replace(self, plan=self.plan.next_step(), position_ids=self.position_ids + 1, lengths=lengths)


def _place(block: Block) -> tuple[Extent, int, int]:
    """Where a block stands, which does not change as it grows."""
    return block.extent, block.first, block.base


def view_length(view: View) -> int:
    """Tokens in a view, which is also the position of the next one."""
    return sum(block.length for block in view)


def plan_pass(segments: Sequence[Segment], device: torch.device) -> ForwardPass:
    """Lay out a forward pass, in O(new tokens + rows x blocks) integers.

    The new tokens must be counted in their blocks' lengths already: every row sees what every other row brings.
    """
    layout = RunLayout()
    layout.add(segments)
    return layout.forward_pass(device)


class RunLayout:
    """Passes that follow each other in time, laid out as one forward pass: each query sees what there was in its own.

    What a query sees hangs on how long blocks were, and nothing else. So passes whose tokens are known are laid out one
    by one while the blocks' lengths grow, and are computed all at once (DESIGN.md section 2).
    """

    def __init__(self) -> None:
        self._num_passes = self._num_tokens = 0
        self._segments: list[Segment] = []
        self._members: dict[int, tuple[Block, list[tuple[int, ...]]]] = {}
        self._positions: list[np.ndarray] = []
        self._writes: list[tuple[np.ndarray, Block, np.ndarray]] = []
        self._decoding = False

    def add(self, segments: Sequence[Segment]) -> None:
        """Lay out the next pass; its new tokens, and no later ones, are counted in their blocks' lengths."""
        self._num_passes += 1
        alone = self._num_passes == 1
        self._decoding = alone and all(segment.write and segment.num_tokens == 1 for segment in segments)
        grows = {id(segment.view[-1]): 1 for segment in segments} if self._decoding else {}
        for segment in segments:
            self._add(segment, grows)

    def _add(self, segment: Segment, grows: dict[int, int]) -> None:
        target, n, offset = segment.view[-1], segment.num_tokens, self._num_tokens
        index = np.arange(target.length - n, target.length)  # places of the new tokens in their block
        self._positions.append(target.base + index)
        if segment.write:
            self._writes.append((np.arange(offset, offset + n), target, index))
        ahead = segment.view[:-1]
        start = view_length(ahead)
        truth = start + target.length - n  # true position of the first new token
        own_shift, start = start - target.base, 0
        shift_grows, start_grows = sum(grows.get(id(block), 0) for block in ahead) if grows else 0, 0
        for block in segment.view:
            growing = grows.get(id(block), 0)
            if block.length:
                turn = own_shift - (start - block.base)
                row = (offset, n, turn, truth - start, block.length)
                turn_grows = shift_grows - start_grows
                seen = self._members.setdefault(id(block), (block, []))[1]
                seen.append((*row, turn_grows, turn_grows + 1, growing))
            start += block.length
            start_grows += growing
        self._segments.append(Segment(tuple(segment.view), n, segment.write))
        self._num_tokens += n

    def forward_pass(self, device: torch.device) -> ForwardPass:
        """Everything that was added, with the blocks where they are now."""
        members, writes = self._members.values(), self._writes
        blocks = [block for block, _ in members]
        table = np.array([row for _, seen in members for row in seen], dtype=np.int64).reshape(-1, 8)
        counts = table[:, 1]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        query, delta, reach, length = (np.repeat(table[:, i], counts) for i in (0, 2, 3, 4))
        reach = reach + within
        sizes = [sum(row[1] for row in seen) for _, seen in members]
        plan = AttentionPlan(
            num_queries=self._num_tokens,
            block_origin=_ints(block.extent.origin for block in blocks),
            block_capacity=_ints(block.extent.capacity for block in blocks),
            block_first=_ints(block.first for block in blocks),
            block_pairs=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
            pair_query=query + within,
            pair_delta=delta,
            pair_reach=reach,
            pair_lo=np.zeros_like(reach),
            pair_hi=np.minimum(length, reach + 1),
            write_query=_concat(query for query, _, _ in writes),
            write_origin=_concat(np.full(len(query), block.extent.origin) for query, block, _ in writes),
            write_capacity=_concat(np.full(len(query), block.extent.capacity) for query, block, _ in writes),
            write_index=_concat(block.first + index for _, block, index in writes),
            growth=Growth(table[:, 5], table[:, 6], table[:, 7]) if self._decoding else None,
        )
        seen = tuple({id(block): block for segment in self._segments for block in segment.view}.values())
        return ForwardPass(
            plan,
            to_device(_concat(self._positions), device),
            tuple(self._segments),
            seen,
            [block.length for block in seen],
            [_place(block) for block in seen],
            self._num_passes,
        )


def _ints(values) -> np.ndarray:  # type: ignore[no-untyped-def]
    return np.fromiter(values, dtype=np.int64)


def _concat(arrays) -> np.ndarray:  # type: ignore[no-untyped-def]
    arrays = list(arrays)
    return np.concatenate(arrays).astype(np.int64, copy=False) if arrays else np.empty(0, np.int64)
