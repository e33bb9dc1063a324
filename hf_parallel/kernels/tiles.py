"""Tiles: a plan's blocks as kernels read them, so that a row's result has the same bits in every schedule.

The keys that a row sees are cut into tiles of equal size at fixed positions of the row, not at the boundaries of
blocks. A tile is computed for all rows that share all of its blocks: a block's first tile may begin in earlier blocks,
and its last one belongs to the next block, unless the row sees no further. The results of tiles are merged in the order
of their positions, whatever the number of queries, rows and threads.

Blocks to which a query is rotated by different angles (Hogwild! Inference, section 3.4) have no common positions: the
tiles of each run of blocks with the same rotation begin at the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hf_parallel.kernels.plan import AttentionPlan, Derived

TILE = 64
"""Keys of a tile of the C kernel, as in `cpu_attention.c`."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The pairs of a plan in the order of the rows' views, and the runs of each row: blocks with the same rotation."""

    order: np.ndarray  # int64 [P], indices of pairs, sorted by query, then by position
    first: np.ndarray  # int64 [R], of the first pair of each run, in this order
    run: np.ndarray  # int64 [P], the run of each
    start: np.ndarray  # int64 [P], keys of the run before the pair's block
    is_last: np.ndarray  # bool [P], whether it is the last block of its run

    def hold(self, plan: AttentionPlan) -> bool:
        """Whether the plan of the next decode step has the same runs, and earlier blocks of a run do not grow."""
        assert plan.increments is not None, "only a decode step has a next step"
        if plan.increments.hi[self.order][~self.is_last].any():
            return False
        return not plan.rotates or np.array_equal(_first_of_runs(plan, self.order), self.first)

    def first_visible(self, plan: AttentionPlan) -> np.ndarray:
        """Return the first key of the run that each pair's query sees: int64 `[P]`, in the order of views."""
        lo = np.minimum(plan.pair_lo[self.order], plan.pair_hi[self.order])  # masked tokens between blocks have no keys
        in_run = np.where(lo > 0, self.start + lo, 0)
        return np.maximum.reduceat(in_run, self.first)[self.run]


@dataclass(frozen=True, eq=False)
class Tiles(Derived):
    """Blocks in the order in which their results are merged, and the keys of each that its pairs compute.

    Keys are counted from the start of the tile in which a block begins: the first `before` of them are in `pieces` of
    earlier blocks. Slots and indices are those of `AttentionPlan`.
    """

    size: int  # keys of a tile
    runs: Runs
    level_blocks: np.ndarray  # int64 [levels + 1], first blocks; a query sees at most one block of a level
    origin: np.ndarray  # int64 [B]
    capacity: np.ndarray
    first: np.ndarray
    before: np.ndarray
    first_piece: np.ndarray  # int64 [B + 1]
    pieces: np.ndarray  # int64 [pieces, 4]: origin, capacity, first index, number of keys
    first_pair: np.ndarray  # int64 [B + 1]
    pairs: np.ndarray  # int64 [Q], indices of the plan's pairs; those without a key are left out
    in_order: np.ndarray  # int64 [Q], their indices in the order of views
    lo: np.ndarray  # int64 [Q], visible keys
    hi: np.ndarray

    def next_step(self, plan: AttentionPlan) -> Tiles | None:
        """Return the tiles of the next decode step: blocks grow at their ends; None if rotations part other runs."""
        if not self.runs.hold(plan):
            return None
        assert plan.increments is not None, "only a decode step has a next step"
        return replace(self, lo=_lower_bounds(self, plan), hi=self.hi + plan.increments.hi[self.pairs])


def make_tiles(plan: AttentionPlan, size: int = TILE) -> Tiles:
    """Cut the keys of a plan into tiles of `size`; raises ValueError if a query sees no key at all."""
    plan.count_by_query(plan.pair_query[plan.pair_lo < plan.pair_hi])
    runs = _runs(plan)
    order = runs.order
    hi = plan.pair_hi[order]
    before = runs.start % size
    end = before + hi
    end = np.where(runs.is_last, end, end // size * size)
    is_computed = runs.first_visible(plan) - (runs.start - before) < end
    heads = _heads(plan, runs, before)

    # Groups of pairs, in the order of blocks: the same block, and the same earlier keys of its first tile.
    in_view = np.empty_like(order)
    in_view[order] = np.arange(len(order))
    computed = np.flatnonzero(is_computed[in_view])  # pairs
    at = in_view[computed]
    block_of_pair = np.repeat(np.arange(plan.num_blocks), np.diff(plan.block_pairs))
    blocks = block_of_pair[computed]
    times = _earlier_equals(blocks * plan.num_queries + plan.pair_query[computed])
    columns = np.column_stack((blocks, times, before[at], heads.reshape(len(order), -1)[at]))
    group = _groups(columns)
    level = _levels(plan.pair_query[computed], group)
    num_groups = len(level)

    by_level = np.argsort(level, kind="stable")
    rank = np.empty_like(by_level)
    rank[by_level] = np.arange(num_groups)
    arranged = np.argsort(rank[group], kind="stable")
    pairs = computed[arranged]
    at = at[arranged]
    counts = np.bincount(rank[group], minlength=num_groups)
    first_pair = _offsets(counts)
    leaders = at[first_pair[:-1]]
    blocks = block_of_pair[pairs[first_pair[:-1]]]
    pieces = heads[leaders]
    is_piece = pieces[..., 3] > 0
    tiles = Tiles(
        size=size,
        runs=runs,
        level_blocks=_offsets(np.bincount(level)),
        origin=plan.block_origin[blocks],
        capacity=plan.block_capacity[blocks],
        first=plan.block_first[blocks],
        before=before[leaders],
        first_piece=_offsets(is_piece.sum(axis=1)),
        pieces=pieces[is_piece],
        first_pair=first_pair,
        pairs=pairs,
        in_order=at,
        lo=pairs,
        hi=end[at],
    )
    return replace(tiles, lo=_lower_bounds(tiles, plan))


def _lower_bounds(tiles: Tiles, plan: AttentionPlan) -> np.ndarray:
    if not plan.pair_lo.any():
        return np.zeros_like(tiles.pairs)
    at = tiles.in_order
    start_of_tile = tiles.runs.start[at] // tiles.size * tiles.size
    return np.maximum(tiles.runs.first_visible(plan)[at] - start_of_tile, 0)


def _runs(plan: AttentionPlan) -> Runs:
    start_in_view = plan.block_start(plan.pair_position)
    order = np.lexsort((start_in_view, plan.pair_query))
    first = _first_of_runs(plan, order)
    run = np.zeros(len(order), np.int64)
    run[first[1:]] = 1
    run = np.cumsum(run)
    counts = plan.pair_hi[order]
    before = np.cumsum(counts) - counts
    is_last = np.zeros(len(order), bool)
    is_last[first[1:] - 1] = True
    is_last[-1:] = True
    return Runs(order, first, run, before - before[first][run], is_last)


def _first_of_runs(plan: AttentionPlan, order: np.ndarray) -> np.ndarray:
    query = plan.pair_query[order]
    delta = plan.pair_delta[order]
    begins = (query[1:] != query[:-1]) | (delta[1:] != delta[:-1])
    return np.flatnonzero(np.concatenate(([True], begins)))


def _heads(plan: AttentionPlan, runs: Runs, before: np.ndarray) -> np.ndarray:
    """Return the pieces of earlier blocks in the first tile of each pair's block: int64 `[P, n, 4]`, in order."""
    block = np.repeat(np.arange(plan.num_blocks), np.diff(plan.block_pairs))[runs.order]
    counts = plan.pair_hi[runs.order]
    missing = before.copy()
    earlier = np.arange(len(block))
    pieces: list[np.ndarray] = []
    while missing.any():
        earlier = np.maximum(earlier - 1, 0)
        taken = np.minimum(counts[earlier], missing)
        missing = missing - taken
        of = block[earlier]
        piece = np.stack(
            (
                plan.block_origin[of],
                plan.block_capacity[of],
                plan.block_first[of] + counts[earlier] - taken,
                taken,
            ),
            axis=1,
        )
        piece[taken == 0] = 0
        pieces.append(piece)
    if not pieces:
        return np.zeros((len(block), 0, 4), np.int64)
    return np.stack(pieces[::-1], axis=1)


def _earlier_equals(numbers: np.ndarray) -> np.ndarray:
    """Return how many equal ones come before each number: a query may see a block several times."""
    order = np.argsort(numbers, kind="stable")
    is_first = np.concatenate(([True], np.diff(numbers[order]) != 0))
    index = np.arange(len(numbers))
    times = np.empty_like(index)
    times[order] = index - np.maximum.accumulate(np.where(is_first, index, 0))
    return times


def _groups(columns: np.ndarray) -> np.ndarray:
    """Number the rows `[Q, n]` by their contents, in ascending order of the first column, by which they are sorted."""
    block = columns[:, 0]
    is_first = np.concatenate(([True], block[1:] != block[:-1]))
    number = np.cumsum(is_first) - 1
    leaders = np.flatnonzero(is_first)
    if np.array_equal(columns, columns[leaders[number]]):  # the rows of a block agree, as in a tree of prompts
        return number
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)


def _levels(query: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the level of each group: one more than the highest level of the groups that precede it in a query.

    Workers see each other's blocks in different orders, but results are merged in the plan's order of blocks, which all
    of them share. Within a run, it equals the order of the view.
    """
    order = np.lexsort((group, query))
    sorted_query = query[order]
    sorted_group = group[order]
    follows = np.flatnonzero(sorted_query[1:] == sorted_query[:-1])
    num_groups = int(group.max(initial=-1)) + 1
    edges = np.unique(sorted_group[follows] * num_groups + sorted_group[follows + 1])
    earlier = edges // max(num_groups, 1)
    later = edges % max(num_groups, 1)
    level = np.zeros(num_groups, np.int64)
    while True:  # edges ascend: there is no cycle
        longer = level.copy()
        np.maximum.at(longer, later, level[earlier] + 1)
        if np.array_equal(longer, level):
            return level
        level = longer


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
