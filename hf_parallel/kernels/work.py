"""From an AttentionPlan to the work of a GPU: shares of keys, each met by a tile of rows.

Work is not split by block but by keys (Hogwild! Inference, appendix B). The keys that tiles of rows read are laid on a
line, one tile after another, and the line is cut into equal parts, one for each program: a tile that lies across a cut
becomes two shares, whose partial results are merged. Everything here is integers on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_parallel.kernels.plan import AttentionPlan

ITEM_FIELDS = ("origin", "capacity", "first", "start", "stop", "first_pair", "num_pairs", "first_slot", "turned")
"""Columns of `Work.items`."""

SHARE_COST = 1
"""What beginning a tile costs, in steps over keys: its queries are read and turned, its results written."""
MIN_LINE = 2
"""Steps over keys that a program is not started for less of: its partial results have to be merged as well."""


class Place(NamedTuple):
    """Where tokens lie in every layer's storage: from row `first` of the extent of `capacity` slots at `origin`."""

    origin: int
    capacity: int
    first: int


@dataclass(frozen=True)
class Cut:
    """How blocks are cut for one launch.

    Attributes
    ----------
    pairs_per_tile : int
        Pairs that one tile holds (its rows over the query heads per KV head that it takes at a time).
    block_n : int
        Keys of one step.
    max_lines : int
        Programs per KV head.
    """

    pairs_per_tile: int
    block_n: int
    max_lines: int


@dataclass(frozen=True, eq=False)
class Work:
    """Shares of a plan's attention.

    Attributes
    ----------
    items : int32 [W, 9]
        One share a row, see `ITEM_FIELDS`: the block's extent and first row in it, which of the block's keys
        (`start <= j < stop`), which pairs, the first of the slots that take its results, and whether any pair turns.
    lines : list of int32 [max_lines + 1]
        Per cut: the items of line `i` are `lines[i] : lines[i + 1]`.
    pairs : int64 [P]
        The plan's pairs that see any key, in its order; items count in these.
    merge_start : int32 [T + 1]
        Offsets into `merge_slot`.
    merge_slot : int32 [S]
        For each query the slots of its partial results.
    most_items, most_slots : int
        As many as there can be for blocks of any length that as many rows see.
    """

    items: np.ndarray
    lines: list[np.ndarray]
    pairs: np.ndarray
    merge_start: np.ndarray
    merge_slot: np.ndarray
    most_items: int
    most_slots: int

    @property
    def num_slots(self) -> int:
        """Partial results of all shares."""
        return len(self.merge_slot)


def make_work(plan: AttentionPlan, cuts: Sequence[Cut], window: int | None = None, horizon: int = 0) -> Work:
    """Cut a plan into shares.

    Parameters
    ----------
    cuts : sequence of Cut
        For tiles of few pairs first; a block goes to the first whose tile holds all of its pairs, or to the last.
    window : int, optional
        Sliding window: positions that a query sees, itself included.
    horizon : int
        Following decode steps that the shares serve as well. A share may lie beyond what its pairs see so far.

    Raises
    ------
    ValueError
        If a query sees no key at all.
    """
    pairs, start, stop = _seen(plan, window, horizon)
    block = np.repeat(np.arange(plan.num_blocks), np.diff(plan.block_pairs))[pairs]
    counts = np.bincount(block, minlength=plan.num_blocks)
    per_tile = np.array([cut.pairs_per_tile for cut in cuts])
    cut_of_block = np.minimum(np.searchsorted(per_tile, counts), len(cuts) - 1)
    per_tile = per_tile[cut_of_block]

    tile_block, tile_index = _expand(-(-counts // per_tile))
    tile_pair = (np.cumsum(counts) - counts)[tile_block] + tile_index * per_tile[tile_block]
    tile_pairs = np.minimum(per_tile[tile_block], counts[tile_block] - tile_index * per_tile[tile_block])
    tile_start, tile_stop = np.minimum.reduceat(start, tile_pair), np.maximum.reduceat(stop, tile_pair)
    tile_turned = np.logical_or.reduceat(_turns(plan)[pairs], tile_pair)

    shares, lines, num_items = [], [], 0
    for number, cut in enumerate(cuts):
        tiles = np.flatnonzero(cut_of_block[tile_block] == number)
        share, first, last, line = _cut_evenly(tile_start[tiles], tile_stop[tiles], cut)
        shares.append((tiles[share], first, last))
        lines.append((line + num_items).astype(np.int32))
        num_items += len(share)
    tile, first, last = (np.concatenate(columns) for columns in zip(*shares, strict=True))

    of_block, num_pairs = tile_block[tile], tile_pairs[tile]
    slot_item, slot_index = _expand(num_pairs)
    slot_query = plan.pair_query[pairs[tile_pair[tile][slot_item] + slot_index]]
    columns = (
        plan.block_origin[of_block],
        plan.block_capacity[of_block],
        plan.block_first[of_block],
        first,
        last,
        tile_pair[tile],
        num_pairs,
        np.cumsum(num_pairs) - num_pairs,
        tile_turned[tile],
    )
    merge_counts = np.bincount(slot_query, minlength=plan.num_queries)
    return Work(
        items=np.stack(columns, axis=1).astype(np.int32),
        lines=lines,
        pairs=pairs,
        merge_start=np.concatenate(([0], np.cumsum(merge_counts))).astype(np.int32),
        merge_slot=np.argsort(slot_query, kind="stable").astype(np.int32),
        most_items=len(tile_block) + sum(cut.max_lines - 1 for cut in cuts),
        most_slots=len(pairs) + sum((cut.max_lines - 1) * cut.pairs_per_tile for cut in cuts),
    )


def longest_run(plan: AttentionPlan) -> int:
    """New tokens of the row that brings most of them: queries in a row, each of which sees one key more."""
    if plan.growth is not None or not len(plan.pair_query):
        return min(len(plan.pair_query), 1)
    steps = (np.diff(plan.pair_query) == 1) & (np.diff(plan.pair_hi) == 1)
    breaks = np.flatnonzero(np.concatenate(([True], ~steps, [True])))
    return int(np.diff(breaks).max())


def _seen(plan: AttentionPlan, window: int | None, horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs that see any key now or within the horizon, and the bounds of what each sees in that time."""
    start = plan.pair_lo if window is None else np.maximum(plan.pair_lo, plan.pair_reach - window + 1)
    stop = plan.pair_hi
    seen_now = np.bincount(plan.pair_query[start < stop], minlength=plan.num_queries)
    if plan.num_queries and seen_now.min() == 0:
        raise ValueError(f"query {int(seen_now.argmin())} of the pass sees no key")
    if horizon:
        assert plan.growth is not None, "only a decode step has others that follow"
        stop = stop + horizon * plan.growth.hi  # the start of a window only moves on
    pairs = np.flatnonzero(start < stop)
    return pairs, start[pairs], stop[pairs]


def _turns(plan: AttentionPlan) -> np.ndarray:
    """Which pairs are turned, in this step or in one that follows."""
    turned = plan.pair_delta != 0
    return turned if plan.growth is None else turned | (plan.growth.delta != 0)


def _cut_evenly(start: np.ndarray, stop: np.ndarray, cut: Cut) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay tiles over keys `start <= j < stop` on a line and cut it into equal parts.

    Returns
    -------
    (tile, first, last, line) : [W], [W], [W], [max_lines + 1]
        For each share its tile and its keys, and the offsets of the lines into the shares.
    """
    steps = -(-(stop - start) // cut.block_n)
    cost = steps + SHARE_COST
    ends = np.cumsum(cost)
    begins = ends - cost
    total = int(ends[-1]) if len(ends) else 0
    num_lines = min(max(total // MIN_LINE, 1), cut.max_lines)
    bounds = total * np.arange(num_lines + 1) // num_lines
    points = np.unique(np.concatenate((begins, bounds)))
    tile = np.searchsorted(ends, points[:-1], side="right")
    first = np.maximum(points[:-1] - begins[tile] - SHARE_COST, 0)
    last = points[1:] - begins[tile] - SHARE_COST
    some = first < last
    tile, first, last = tile[some], start[tile[some]] + first[some] * cut.block_n, last[some] * cut.block_n
    line_of_share = np.searchsorted(bounds, points[:-1][some], side="right") - 1
    lines = np.searchsorted(line_of_share, np.arange(cut.max_lines + 1))
    return tile, first, np.minimum(start[tile] + last, stop[tile]), lines


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each index `i` repeated `counts[i]` times, and the running number within its repeats."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
