"""Blocks, views, and the step from them to an AttentionPlan (DESIGN.md section 2).

A block is a run of tokens stored once; a view is the ordered list of blocks that a row sees, the last one being
where it writes. Positions follow from the lengths alone, so that no position is ever stored or updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import AttentionPlan
from .arena import Extent


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
    block that it is written to. `segments` are in packed order.
    """

    plan: AttentionPlan
    position_ids: torch.Tensor
    segments: Sequence[Segment]

    @property
    def last_tokens(self) -> list[int]:
        """Index of each segment's last packed token."""
        return (np.cumsum([segment.num_tokens for segment in self.segments]) - 1).tolist()


def view_length(view: View) -> int:
    """Tokens in a view, which is also the position of the next one."""
    return sum(block.length for block in view)


def plan_pass(segments: Sequence[Segment], device: torch.device) -> ForwardPass:
    """Lay out a forward pass, in O(new tokens + rows x blocks) integers.

    The new tokens must be counted in their blocks' lengths already: every row sees what every other row brings.
    """
    members: dict[int, tuple[Block, list[tuple[int, int, int, int, int]]]] = {}
    positions: list[np.ndarray] = []
    writes: list[tuple[np.ndarray, Block, np.ndarray]] = []
    offset = 0
    for segment in segments:
        target, n = segment.view[-1], segment.num_tokens
        index = np.arange(target.length - n, target.length)  # places of the new tokens in their block
        positions.append(target.base + index)
        if segment.write:
            writes.append((np.arange(offset, offset + n), target, index))
        start = view_length(segment.view[:-1])
        truth = start + target.length - n  # true position of the first new token
        own_shift, start = start - target.base, 0
        for block in segment.view:
            if block.length:
                turn = own_shift - (start - block.base)
                members.setdefault(id(block), (block, []))[1].append((offset, n, turn, truth - start, block.length))
            start += block.length
        offset += n
    blocks = [block for block, _ in members.values()]
    rows = [row for _, seen in members.values() for row in seen]
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    counts = table[:, 1]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    query, delta, reach, length = (np.repeat(table[:, i], counts) for i in (0, 2, 3, 4))
    reach = reach + within
    sizes = [sum(row[1] for row in seen) for _, seen in members.values()]
    plan = AttentionPlan(
        num_queries=offset,
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
    )
    return ForwardPass(plan, torch.from_numpy(_concat(positions)).to(device), tuple(segments))


def _ints(values) -> np.ndarray:  # type: ignore[no-untyped-def]
    return np.fromiter(values, dtype=np.int64)


def _concat(arrays) -> np.ndarray:  # type: ignore[no-untyped-def]
    arrays = list(arrays)
    return np.concatenate(arrays).astype(np.int64, copy=False) if arrays else np.empty(0, np.int64)
