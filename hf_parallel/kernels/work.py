"""Partition of a plan's attention into work items, in equal parts for the programs of a GPU (stream-K).

Work is split by keys, not by blocks (Hogwild! Inference, appendix B). The keys that each tile of rows reads are laid
out one tile after another, and this sequence is cut into equal parts, one per program. A tile that is cut becomes two
work items, whose partial results are merged. Everything here is integers on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_parallel.kernels.plan import AttentionPlan
from hf_parallel.kernels.storage import FIRST_QUANTIZED

ITEM_FIELDS = ("origin", "capacity", "first", "start", "stop", "first_pair", "num_pairs", "first_slot", "rotated")
ITEM_COST = 1  # of starting a tile (reading and rotating its queries, writing its results), in steps over keys
MIN_STEPS = 2  # minimum steps over keys per program; with fewer, merging its results costs more than it saves


@dataclass(frozen=True)
class Partition:
    """Partition of the blocks of one kernel launch."""

    pairs_per_tile: int  # rows of a tile, divided by the query heads per KV head that it holds
    block_n: int  # keys per step
    max_programs: int  # per KV head
    quantized: bool = False  # whether it is for blocks in 8 bits


@dataclass(frozen=True, eq=False)
class Work:
    """Work items of a plan's attention.

    An item (`ITEM_FIELDS`) consists of the block's extent and first index in it, the keys `start <= j < stop` of the
    block, the pairs (from index `first_pair` of `pairs`), the first slot of its results, whether any pair is rotated.
    Program `i` of partition `p` computes the items `item_offsets[p][i] : item_offsets[p][i + 1]`.
    """

    items: np.ndarray  # int32 [W, 9]
    item_offsets: list[np.ndarray]  # int32 [max_programs + 1] per partition
    pairs: np.ndarray  # int64 [P], indices of the plan's pairs that see any key within the horizon, ascending
    merge_start: np.ndarray  # int32 [T + 1], offsets into merge_slot
    merge_slot: np.ndarray  # int32 [S], slots of the partial results of each query
    max_items: int  # upper bounds of W and S for the same pairs over blocks of any length
    max_slots: int


def make_work(
    plan: AttentionPlan,
    partitions: Sequence[Partition],
    window: int | None = None,
    chunk: int | None = None,
    horizon: int = 0,
) -> Work:
    """Partition a plan, under a sliding window or in chunks, into work items.

    Raises `ValueError` if a query sees no key at all.

    Partitions are in ascending order of `pairs_per_tile`. A block belongs to the first whose tile holds all its pairs,
    or to the last, among those for blocks in 8 bits if it is one. The items also serve the next `horizon` decode steps,
    so some may cover keys that do not exist yet.
    """
    pairs, start, stop = _visible_pairs(plan, window, chunk, horizon)
    block = np.repeat(np.arange(plan.num_blocks), np.diff(plan.block_pairs))[pairs]
    counts = np.bincount(block, minlength=plan.num_blocks)
    per_tile = np.array([partition.pairs_per_tile for partition in partitions])
    partition_of_block = np.zeros(plan.num_blocks, np.int64)
    quantized = plan.block_origin >= FIRST_QUANTIZED
    for is_quantized in {partition.quantized for partition in partitions}:
        numbers = np.array([i for i, partition in enumerate(partitions) if partition.quantized == is_quantized])
        chosen = np.minimum(np.searchsorted(per_tile[numbers], counts), len(numbers) - 1)
        blocks = quantized == is_quantized
        partition_of_block[blocks] = numbers[chosen][blocks]
    per_tile = per_tile[partition_of_block]

    tile_block, tile_index = _expand(-(-counts // per_tile))
    first_pair = np.cumsum(counts) - counts  # of each block
    pairs_before = tile_index * per_tile[tile_block]  # of each tile, in its block
    tile_pair = first_pair[tile_block] + pairs_before
    tile_pairs = np.minimum(per_tile[tile_block], counts[tile_block] - pairs_before)
    tile_start = np.minimum.reduceat(start, tile_pair)
    tile_stop = np.maximum.reduceat(stop, tile_pair)
    rotated = plan.pair_delta != 0  # in this step, or in a following one
    if plan.increments is not None:
        rotated |= plan.increments.delta != 0
    tile_rotated = np.logical_or.reduceat(rotated[pairs], tile_pair)

    parts = []
    item_offsets = []
    num_items = 0
    for number, partition in enumerate(partitions):
        tiles = np.flatnonzero(partition_of_block[tile_block] == number)
        tile, first, last, offsets = _split_evenly(tile_start[tiles], tile_stop[tiles], partition)
        parts.append((tiles[tile], first, last))
        item_offsets.append((offsets + num_items).astype(np.int32))
        num_items += len(tile)
    tile = np.concatenate([tiles for tiles, _, _ in parts])
    first = np.concatenate([starts for _, starts, _ in parts])
    last = np.concatenate([stops for _, _, stops in parts])

    of_block = tile_block[tile]
    item_pair = tile_pair[tile]
    num_pairs = tile_pairs[tile]
    slot_item, slot_index = _expand(num_pairs)
    slot_pair = pairs[item_pair[slot_item] + slot_index]
    slot_query = plan.pair_query[slot_pair]
    first_slot = np.cumsum(num_pairs) - num_pairs
    columns = (  # in the order of `ITEM_FIELDS`
        plan.block_origin[of_block],
        plan.block_capacity[of_block],
        plan.block_first[of_block],
        first,
        last,
        item_pair,
        num_pairs,
        first_slot,
        tile_rotated[tile],
    )
    merge_counts = np.bincount(slot_query, minlength=plan.num_queries)
    return Work(
        items=np.stack(columns, axis=1).astype(np.int32),
        item_offsets=item_offsets,
        pairs=pairs,
        merge_start=np.concatenate(([0], np.cumsum(merge_counts))).astype(np.int32),
        merge_slot=np.argsort(slot_query, kind="stable").astype(np.int32),
        max_items=len(tile_block) + sum(partition.max_programs - 1 for partition in partitions),
        max_slots=len(pairs) + sum((partition.max_programs - 1) * partition.pairs_per_tile for partition in partitions),
    )


def _visible_pairs(
    plan: AttentionPlan, window: int | None, chunk: int | None, horizon: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs that see any key within the horizon, and the bounds of the keys that each sees in that time."""
    start = plan.first_visible(plan.pair_position, window, chunk)
    stop = plan.pair_hi
    plan.count_by_query(plan.pair_query[start < stop])
    if horizon:
        assert plan.increments is not None, "only a decode step has a horizon"
        stop = stop + horizon * plan.increments.hi  # start needs no change: under a window it only grows
        if chunk is not None:  # a block moves toward the query's chunk while blocks before it grow
            later = plan.pair_position + plan.increments.position
            moves = plan.block_start(later) - plan.block_start(plan.pair_position)
            start = np.maximum(plan.pair_lo, start - horizon * moves)
    pairs = np.flatnonzero(start < stop)
    return pairs, start[pairs], stop[pairs]


def _split_evenly(
    start: np.ndarray, stop: np.ndarray, partition: Partition
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split tiles over keys `start <= j < stop` evenly among programs."""
    # Returns the tile, start and stop of each item `[W]`, and the items' offsets by program `[max_programs + 1]`
    steps = -(-(stop - start) // partition.block_n)
    cost = steps + ITEM_COST
    ends = np.cumsum(cost)
    begins = ends - cost
    total = int(ends[-1]) if len(ends) else 0
    num_programs = min(max(total // MIN_STEPS, 1), partition.max_programs)
    bounds = total * np.arange(num_programs + 1) // num_programs
    points = np.unique(np.concatenate((begins, bounds)))
    tile = np.searchsorted(ends, points[:-1], side="right")
    first_step = np.maximum(points[:-1] - begins[tile] - ITEM_COST, 0)
    last_step = points[1:] - begins[tile] - ITEM_COST
    nonempty = first_step < last_step
    tile = tile[nonempty]
    first = start[tile] + first_step[nonempty] * partition.block_n
    last = start[tile] + last_step[nonempty] * partition.block_n
    program = np.searchsorted(bounds, points[:-1][nonempty], side="right") - 1
    offsets = np.searchsorted(program, np.arange(partition.max_programs + 1))
    return tile, first, np.minimum(last, stop[tile]), offsets


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each index `i` repeated `counts[i]` times, and the position within its repeats."""
    owner = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - np.repeat(begins, counts)
