"""Segments of a batch, and their translation into an AttentionPlan (docs/block_attention.md).

A view is the ordered list of blocks that a row sees; the row appends to the last one. A token's position in a view
follows from the block lengths: it is never stored or updated.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from hf_parallel.cache.images import ImageSpan, ImageTable, is_image
from hf_parallel.cache.pool import Block, Pool, parts_of
from hf_parallel.kernels import AttentionPlan, Increments, to_device

_PARTS = attrgetter("parts")

View = Sequence[Block]


class Segment(NamedTuple):
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

    def frozen(self) -> Segment:
        """Return the segment with its view as it is now."""
        if type(self.view) is tuple:
            return self
        return Segment(tuple(self.view), self.num_tokens, self.write, self.images, self.keeps_state)


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
        return segment._replace(view=[*parts_of(segment.view)])
    return segment


def find_images(
    segment: Segment, tokens: Sequence[int], table: ImageTable, placeholder: int
) -> tuple[Segment, Sequence[int]]:
    """Return a segment with its image tokens, and its tokens with a placeholder for each of them."""
    if not is_image(max(tokens)):
        return segment, tokens
    with_images = segment._replace(images=tuple(table.spans(tokens)))
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
            pool.check_owned(*segment.view)
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
    packed: list[Segment] = []
    images: list[ImageSpan] = []
    ahead: list[tuple[int, int, int]] = []  # queries that see their block up to an index beyond their own
    decoding = len(passes) == 1
    numbers: dict[Block, int] = {}  # of all blocks, in the order in which they are met
    of_passes: list[_PassTable] = []
    num_tokens = 0
    for segments in passes:
        for segment in segments:
            if segment.write:
                segment.view[-1].length += segment.num_tokens
        table = _PassTable.of(segments, numbers, num_tokens)
        of_passes.append(table)
        decoding = decoding and table.is_decode_step
        for number, segment in enumerate(segments):
            packed.append(segment.frozen())
            for span in segment.images:
                first = int(table.first_token[number])
                images.append(span._replace(at=first + span.at))
                if span.image.bidirectional_layers:
                    index = int(table.start[number])
                    ahead.append((first + span.at, first + span.end, index + span.end))
        num_tokens += int(table.counts.sum())
    by_position = sorted(numbers, key=lambda block: (block.base, block.age))
    ranks = np.empty(len(numbers), np.int64)
    ranks[[numbers[block] for block in by_position]] = np.arange(len(numbers))
    pairs = _Pairs.of(of_passes, ranks)
    locations = np.array([(block.extent.origin, block.extent.capacity, block.first) for block in numbers])
    plan = _attention_plan(of_passes, pairs, locations, num_tokens, decoding, ahead)
    in_order = None
    if ahead:
        in_order = _attention_plan(of_passes, pairs, locations, num_tokens, decoding, ())
    first_positions = np.concatenate([table.base + table.start for table in of_passes])
    counts = np.concatenate([table.counts for table in of_passes])
    positions = ranges(first_positions, counts)
    if any(span.image.corrections is not None for span in images):
        positions = np.repeat(positions[None], 3, axis=0)
    for span in images:
        corrections = span.image.corrections
        if corrections is not None:
            of_span = corrections[:, span.first : span.stop]
            positions[:, span.at : span.end] += of_span.numpy()
    return ForwardPass(plan, to_device(positions, device), tuple(packed), len(passes), images=images, in_order=in_order)


class _PassTable(NamedTuple):
    """Segments of one of several consecutive passes, and the blocks of their views, as integers.

    Blocks have the new tokens of the pass. A pair is a block of a segment's view.
    """

    # of each segment, int64 [S]
    counts: np.ndarray  # new tokens
    first_token: np.ndarray  # among the tokens of all passes
    target: np.ndarray  # number of the block to which it appends
    base: np.ndarray  # of that block
    start: np.ndarray  # in it, of the first new token
    writes: np.ndarray  # bool
    # of each pair, in the order of the views, int64 [P]
    pair_segment: np.ndarray
    pair_block: np.ndarray  # number
    length: np.ndarray
    delta: np.ndarray  # rotation
    first_position: np.ndarray  # of the first new token, counted from the start of the block
    step: np.ndarray  # what a decode step adds to the rotation
    grows: np.ndarray  # 1 if a segment of the pass appends to the block

    @property
    def is_decode_step(self) -> bool:
        """Whether every segment appends one token."""
        return bool(self.writes.all() and (self.counts == 1).all())

    @classmethod
    def of(cls, segments: Sequence[Segment], numbers: dict[Block, int], num_tokens: int) -> _PassTable:
        """Return the table of a pass after `num_tokens` tokens. Blocks that `numbers` does not have are added to it."""
        for segment in segments:
            for block in segment.view:
                if block not in numbers:
                    numbers[block] = len(numbers)
        of_pairs = [numbers[block] for segment in segments for block in segment.view]
        sizes = np.array([len(segment.view) for segment in segments])
        counts = np.array([segment.num_tokens for segment in segments])
        writes = np.array([segment.write for segment in segments])
        lengths = np.array([block.length for block in numbers])
        bases = np.array([block.base for block in numbers])
        gaps = np.array([block.gap for block in numbers])
        shifts = np.array([block.shift for block in numbers])
        pair_block = np.array(of_pairs)
        last = np.cumsum(sizes) - 1  # pair of each segment's target
        pair_segment = np.repeat(np.arange(len(sizes)), sizes)
        target = pair_block[last]
        grows = np.zeros(len(numbers), np.int64)
        grows[target[writes]] = 1

        def before(values: np.ndarray) -> np.ndarray:
            """Return the sum over the blocks before each in its view."""
            sums = np.cumsum(values) - values
            first = last - sizes + 1
            return sums - sums[first][pair_segment]

        length = lengths[pair_block]
        start_in_view = before(length)
        shift = before(shifts[pair_block])
        masked = before(gaps[pair_block])
        start_step = before(grows[pair_block])
        of_last = last[pair_segment]
        target_start = start_in_view[of_last] + shift[of_last] - shift
        start = lengths[target] - counts
        position = (start_in_view[last] + start)[pair_segment]
        masked_after = (
            (masked[last] + gaps[target])[pair_segment] - masked - gaps[pair_block]
        )  # after the start of the block
        return cls(
            counts=counts,
            first_token=num_tokens + np.cumsum(counts) - counts,
            target=target,
            base=bases[target],
            start=start,
            writes=writes,
            pair_segment=pair_segment,
            pair_block=pair_block,
            length=length,
            delta=(target_start - bases[target][pair_segment]) - (start_in_view - bases[pair_block]),
            first_position=position - start_in_view + masked_after,
            step=start_step[of_last] - start_step,
            grows=grows[pair_block],
        )


class _Pairs(NamedTuple):
    """The pairs of all passes whose blocks hold tokens, by block.

    Blocks are in the order of the positions at which their tokens were computed, and at the same one by age: in this
    order a query's results are merged, whatever other rows the pass has.
    """

    blocks: np.ndarray  # int64 [B], numbers
    num_pairs: np.ndarray  # int64 [B], (segment, block) pairs of each
    # of each pair, int64 [P]
    first_query: np.ndarray
    counts: np.ndarray
    delta: np.ndarray
    first_position: np.ndarray
    num_keys: np.ndarray
    step: np.ndarray
    grows: np.ndarray
    is_target: np.ndarray  # 1 if the segment appends to the block

    @classmethod
    def of(cls, tables: Sequence[_PassTable], ranks: np.ndarray) -> _Pairs:
        """Return the pairs of consecutive passes; `ranks` int64 `[blocks]` is the place of each block in the order."""
        columns = []
        for table in tables:
            segment = table.pair_segment
            columns.append(
                np.stack(
                    (
                        table.pair_block,
                        table.first_token[segment],
                        table.counts[segment],
                        table.delta,
                        table.first_position,
                        table.length,
                        table.step,
                        table.grows,
                        table.pair_block == table.target[segment],
                    )
                )
            )
        pairs = np.concatenate(columns, axis=1)
        pairs = pairs[:, pairs[5] > 0]
        rank = ranks[pairs[0]]
        by_block = np.argsort(rank, kind="stable")
        pairs = pairs[:, by_block]
        _, first, num_pairs = np.unique(rank[by_block], return_index=True, return_counts=True)
        return cls(pairs[0][first], num_pairs, *pairs[1:])


def _attention_plan(
    tables: Sequence[_PassTable],
    pairs: _Pairs,
    locations: np.ndarray,
    num_queries: int,
    decoding: bool,
    ahead: Sequence[tuple[int, int, int]],
) -> AttentionPlan:
    """Expand (segment, block) pairs to (query, block) pairs, given the blocks' origins, capacities and first indices.

    `locations` are int64 `[blocks, 3]`.
    """
    counts = pairs.counts
    origin, capacity, first = np.ascontiguousarray(locations[pairs.blocks].T)
    position = ranges(pairs.first_position, counts)
    query = ranges(pairs.first_query, counts)
    stop = position + 1
    if ahead:
        seen = np.zeros(num_queries, np.int64)
        for begin, end, index in ahead:
            seen[begin:end] = index
        stop = np.where(np.repeat(pairs.is_target > 0, counts), np.maximum(stop, seen[query]), stop)
    last_pairs = np.cumsum(pairs.num_pairs) - 1
    written = [table.writes for table in tables]
    write_query = np.concatenate([table.first_token[stored] for table, stored in zip(tables, written, strict=True)])
    write_counts = np.concatenate([table.counts[stored] for table, stored in zip(tables, written, strict=True)])
    targets = np.concatenate([table.target[stored] for table, stored in zip(tables, written, strict=True)])
    write_index = np.concatenate([table.start[stored] for table, stored in zip(tables, written, strict=True)])
    write_origin, write_capacity, write_first = locations[targets].T
    return AttentionPlan(
        num_queries=num_queries,
        block_origin=origin,
        block_capacity=capacity,
        block_first=first,
        block_pairs=np.append(0, np.cumsum(counts)[last_pairs]),
        pair_query=query,
        pair_delta=np.repeat(pairs.delta, counts),
        pair_position=position,
        pair_lo=np.zeros_like(position),
        pair_hi=np.minimum(np.repeat(pairs.num_keys, counts), stop),
        write_query=ranges(write_query, write_counts),
        write_origin=np.repeat(write_origin, write_counts),
        write_capacity=np.repeat(write_capacity, write_counts),
        write_index=ranges(write_first + write_index, write_counts),
        increments=Increments(pairs.step, pairs.step + 1, pairs.grows) if decoding else None,
    )


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ranges of `counts` integers that begin with `first`, int64 `[segments]` each."""
    before = np.cumsum(counts) - counts  # integers of the ranges before each
    return np.arange(counts.sum()) + np.repeat(first - before, counts)
