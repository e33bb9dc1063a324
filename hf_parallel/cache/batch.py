"""Segments of a batch, and their translation into an AttentionPlan (docs/block_attention.md).

A view is the ordered list of blocks that a row sees; the row appends to the last one. A token's position in a view
follows from the block lengths: it is never stored or updated.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch

from hf_parallel.cache.images import ImageSpan, ImageTable, is_image
from hf_parallel.cache.pool import Block, Pool, parts_of
from hf_parallel.kernels import AttentionPlan, Increments, to_device

_PARTS = attrgetter("parts")

View = Sequence[Block]


@dataclass(frozen=True)
class Segment:
    """New tokens of one row in a forward pass: `num_tokens` tokens appended to the last block of `view`.

    With `write=False` they are the last tokens of that block, which are computed again (for their logits) and not
    stored. `images`: the image tokens among them. `keeps_state`: with `write=False`, the state after these tokens is
    kept, in place of one that was dropped.
    """

    view: View
    num_tokens: int
    write: bool = True
    images: tuple[ImageSpan, ...] = ()
    keeps_state: bool = False


@dataclass(eq=False)
class ForwardPass:
    """One forward pass: its attention plan, and `position_ids`, int64 `[T]` or `[3, T]`, as arguments of the model.

    The model rotates queries and keys to `position_ids`: a token's index in its block plus the block's `base`.
    `continues`: this is the decode step after the pass before, of the same rows, one token further.
    """

    plan: AttentionPlan
    position_ids: torch.Tensor
    segments: Sequence[Segment]  # in packed order, with their views at the time of the pass
    num_passes: int = 1  # number of consecutive passes that are computed as this one
    continues: bool = False
    version: int = -1  # of the pool when the pass was prepared
    images: Sequence[ImageSpan] = ()  # image tokens, `at` packed indices
    in_order: AttentionPlan | None = None  # for layers in which image tokens see earlier tokens only, as text does

    @property
    def last_tokens(self) -> list[int]:
        """Index of each segment's last packed token."""
        return (np.cumsum([segment.num_tokens for segment in self.segments]) - 1).tolist()

    @property
    def is_decode_step(self) -> bool:
        """Whether every row appends exactly one token."""
        return self.plan.increments is not None

    def leads_to(self, segments: Sequence[Segment]) -> bool:
        """Whether `segments` are the next decode step after this one, if no block has changed since."""
        if len(segments) != len(self.segments) or self.images:
            return False
        for new, old in zip(segments, self.segments, strict=True):
            block = old.view[-1]
            if new.num_tokens != 1 or not new.write or new.images or tuple(new.view) != old.view:
                return False
            if block.first + block.length >= block.extent.capacity:
                return False
        return True

    def next_step(self) -> ForwardPass:
        """Return the pass of the next decode step."""
        step = copy.copy(self)  # faster than `dataclasses.replace`
        step.plan = self.plan.next_step()
        step.position_ids = self.position_ids + 1
        step.continues = True
        return step


def with_parts(segment: Segment) -> Segment:
    """Return a segment whose view has the parts of blocks that were split."""
    if any(map(_PARTS, segment.view)):
        return replace(segment, view=[*parts_of(segment.view)])
    return segment


def find_images(
    segment: Segment, tokens: Sequence[int], table: ImageTable, placeholder: int
) -> tuple[Segment, Sequence[int]]:
    """Return a segment with its image tokens, and its tokens with a placeholder for each of them."""
    if not is_image(max(tokens)):
        return segment, tokens
    with_images = replace(segment, images=tuple(table.spans(tokens)))
    return with_images, [placeholder if is_image(token) else token for token in tokens]


def view_length(view: View) -> int:
    """Return the number of tokens in a view."""
    return sum(block.length for block in view)


def next_position(view: View) -> int:
    """Return the position of the token after a view."""
    return sum(block.length + block.shift for block in view)


def new_tokens(pool: Pool, passes: Sequence[Sequence[Segment]]) -> Counter[Block]:
    """Validate the segments of consecutive passes; return the number of new tokens by block, 0 for a new state only."""
    count: Counter[Block] = Counter()
    for segments in passes:
        written: set[Block] = set()
        read: set[Block] = set()
        for segment in segments:
            if not segment.view or segment.num_tokens < 1:
                raise ValueError(f"a segment needs a view and at least one new token, got {segment!r}")
            for block in segment.view:
                pool.check_owned(block)
            target = segment.view[-1]
            if not segment.write and segment.num_tokens > target.length + count[target]:
                raise ValueError(f"a segment cannot reread more tokens than its block holds, got {segment!r}")
            if target in written or (segment.write and target in read):
                raise ValueError("two segments of a pass write to one block, or one rereads what the other writes")
            (written if segment.write else read).add(target)
            if segment.write or segment.keeps_state:
                count[target] += segment.num_tokens if segment.write else 0
    return count


def plan_passes(passes: Sequence[Sequence[Segment]], device: torch.device) -> ForwardPass:
    """Plan consecutive passes as one forward pass, in O(new tokens + rows x blocks) integers.

    The keys that a query sees depend on the block lengths only. The new tokens of a pass are added to the lengths just
    before that pass is planned, so that a query sees the new tokens of all rows in its own pass, and no later ones.
    """
    table: dict[Block, list[tuple[int, ...]]] = {}
    packed: list[Segment] = []
    tokens: list[tuple[int, ...]] = []  # position and number of the tokens of each segment
    images: list[ImageSpan] = []
    ahead: list[tuple[int, int, int]] = []  # queries that see their block up to an index beyond their own
    writes: list[tuple[int, ...]] = []  # query, number of tokens, origin, capacity and index of each stored segment
    decoding = len(passes) == 1
    num_tokens = 0
    for segments in passes:
        growing = set()
        for segment in segments:
            if segment.write:
                segment.view[-1].length += segment.num_tokens
                growing.add(segment.view[-1])
            decoding = decoding and segment.write and segment.num_tokens == 1
        for segment in segments:
            target = segment.view[-1]
            count = segment.num_tokens
            index = target.length - count
            extent = target.extent
            tokens.append((target.base + index, count))
            if segment.write:
                writes.append((num_tokens, count, extent.origin, extent.capacity, target.first + index))
            _add_pairs(table, segment, num_tokens, growing)
            for span in segment.images:
                images.append(span._replace(at=num_tokens + span.at))
                if span.image.bidirectional_layers:
                    ahead.append((num_tokens + span.at, num_tokens + span.end, index + span.end))
            packed.append(Segment(tuple(segment.view), count, segment.write, segment.images))
            num_tokens += count
    write_table = np.array(writes, np.int64).reshape(-1, 5)
    plan = _attention_plan(table, write_table, num_tokens, decoding, ahead)
    in_order = None
    if ahead:
        in_order = _attention_plan(table, write_table, num_tokens, decoding, ())
    first_positions, counts = np.array(tokens, np.int64).T
    positions = ranges(first_positions, counts)
    if any(span.image.corrections is not None for span in images):
        positions = np.repeat(positions[None], 3, axis=0)
    for span in images:
        corrections = span.image.corrections
        if corrections is not None:
            of_span = corrections[:, span.first : span.stop]
            positions[:, span.at : span.end] += of_span.numpy()
    return ForwardPass(plan, to_device(positions, device), tuple(packed), len(passes), images=images, in_order=in_order)


def _add_pairs(
    table: dict[Block, list[tuple[int, ...]]], segment: Segment, offset: int, growing: Collection[Block]
) -> None:
    """Add a table entry for each block of a segment's view: rotation and slot, and their increments per step."""
    target = segment.view[-1]
    n = segment.num_tokens
    target_start = 0
    target_step = 0
    masked = 0
    shift = 0
    for block in segment.view:
        target_start += block.length
        target_step += block in growing
        masked += block.gap
        shift += block.shift
    position = target_start - n  # number of tokens before the first new one
    target_start -= target.length
    target_step -= target in growing
    shift -= target.shift
    start = 0
    start_step = 0
    for block in segment.view:
        grows = block in growing
        masked -= block.gap  # those after the start of the block
        if block.length:
            delta = (target_start + shift - target.base) - (start - block.base)
            step = target_step - start_step
            first_position = position - start + masked
            row = (offset, n, delta, first_position, block.length, step, step + 1, grows, block is target)
            table.setdefault(block, []).append(row)
        start += block.length
        shift -= block.shift  # those after the start of the next block
        start_step += grows


def _attention_plan(
    table: dict[Block, list[tuple[int, ...]]],
    writes: np.ndarray,
    num_queries: int,
    decoding: bool,
    ahead: Sequence[tuple[int, int, int]],
) -> AttentionPlan:
    """Expand the table of `_add_pairs` to (query, block) pairs, with the blocks at their current locations."""
    all_rows = [row for rows in table.values() for row in rows]
    pairs = np.array(all_rows, np.int64).reshape(-1, 9)
    first_query, counts, delta, first_position, num_keys, delta_step, position_step, hi_step, sees_ahead = pairs.T
    last_rows = np.cumsum([len(rows) for rows in table.values()], dtype=np.int64) - 1
    locations = [(block.extent.origin, block.extent.capacity, block.first) for block in table]
    origin, capacity, first = np.ascontiguousarray(np.array(locations, np.int64).T)
    position = ranges(first_position, counts)
    query = ranges(first_query, counts)
    stop = position + 1
    if ahead:
        seen = np.zeros(num_queries, np.int64)
        for begin, end, index in ahead:
            seen[begin:end] = index
        stop = np.where(np.repeat(sees_ahead, counts), np.maximum(stop, seen[query]), stop)
    write_query, write_counts, write_origin, write_capacity, write_index = writes.T
    return AttentionPlan(
        num_queries=num_queries,
        block_origin=origin,
        block_capacity=capacity,
        block_first=first,
        block_pairs=np.append(0, np.cumsum(counts)[last_rows]),
        pair_query=query,
        pair_delta=np.repeat(delta, counts),
        pair_position=position,
        pair_lo=np.zeros_like(position),
        pair_hi=np.minimum(np.repeat(num_keys, counts), stop),
        write_query=ranges(write_query, write_counts),
        write_origin=np.repeat(write_origin, write_counts),
        write_capacity=np.repeat(write_capacity, write_counts),
        write_index=ranges(write_index, write_counts),
        increments=Increments(delta_step, position_step, hi_step) if decoding else None,
    )


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ranges of `counts` integers that begin with `first`, int64 `[segments]` each."""
    before = np.cumsum(counts) - counts  # integers of the ranges before each
    return np.arange(counts.sum()) + np.repeat(first - before, counts)
