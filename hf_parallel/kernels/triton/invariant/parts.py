"""Attention by parts of a fixed number of keys: a row's result has the same bits in every schedule.

The keys of a row are cut into parts at fixed positions of the row (`hf_parallel.kernels.tiles`). One kernel computes a
part for all rows that share its blocks, with one tiling for each shape of layer, and another merges the results of a
query in the order of their positions. Neither looks at how many rows or blocks the pass has: it only decides how many
programs there are. docs/kernels.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.tiles import Tiles, make_tiles
from hf_parallel.kernels.triton.invariant.part_kernels import attend_part_kernel
from hf_parallel.kernels.triton.kernels import advance_kernel, merge_kernel
from hf_parallel.kernels.triton.launch import (
    PAIRS_PER_PROGRAM,
    Buffers,
    LayerShape,
    Tiling,
    aligned,
    block_size,
    dim_constants,
    frequencies,
    on_device,
)

PART = 256  # keys; a multiple of every tiling's `block_n`
ITEM_FIELDS = ("origin", "capacity", "first", "before", "first_gathered", "part", "first_pair", "num_pairs")
MAX_PARTIAL_BYTES = 256 << 20  # of partial results; queries that need more are computed one range after another
_PARTS_PER_STEP = 16  # partial results merged at once


def part_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Return the only tiling of layers with a head size and a dtype, for any number of rows."""
    if dtype == torch.float32:
        return Tiling(16, 16, 4, 3, 2) if head_dim <= 256 else Tiling(16, 16, 8, 1, 1)
    if head_dim <= 128:
        return Tiling(32, 64, 4, 2, 2)
    if head_dim <= 256:
        return Tiling(32, 32, 4, 2, 2)
    return Tiling(16, 32, 8, 2, 1)


@dataclass(frozen=True, eq=False)
class _QueryRange:
    """Consecutive queries whose partial results fit into memory."""

    number: int  # in the names of its arrays
    first: int
    stop: int
    num_items: int
    num_slots: int


class PartsLaunch:
    """Items of a plan for layers of one shape, on their device."""

    def __init__(self, plan: AttentionPlan, shape: LayerShape) -> None:
        narrowed = plan.windowed(shape.window, shape.chunk)
        tiles = narrowed.cached(("tiles", PART), lambda: make_tiles(narrowed, PART))
        self.shape = shape
        self.tiling = part_tiling(max(shape.head_dim, shape.value_dim), shape.dtype)
        arrays = {"gathered": _gathered(tiles).reshape(-1)}
        self.ranges = _cut(narrowed, tiles, shape, self.tiling, arrays)
        self.buffers = Buffers(arrays, shape.device)
        self.buffers.load(arrays)
        self.rotates = shape.rotary is not None and plan.rotates
        self.tables = [self._rotation(self.buffers[f"delta {queries.number}"]) for queries in self.ranges]

    def _rotation(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of pairs, float32 `[P, rotary_dim / 2]`."""
        rotary = self.shape.rotary
        half = 0 if rotary is None else len(rotary.inv_freq)
        tables = torch.empty(2, len(delta), half, dtype=torch.float32, device=delta.device)
        cos, sin = tables
        if self.rotates and rotary is not None:
            step = torch.empty(1, dtype=torch.int32, device=delta.device)
            with on_device(delta.device):
                advance_kernel[(len(delta) // PAIRS_PER_PROGRAM,)](
                    delta, delta, frequencies(rotary, delta.device), cos, sin, step, 0,
                    HALF=half, BLOCK_H=block_size(half), BLOCK_P=PAIRS_PER_PROGRAM,
                )  # fmt: skip
        return cos, sin


def attend_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    leads: Tensor,
    plan: AttentionPlan,
    params: AttentionParams,
    shape: LayerShape,
) -> Tensor:
    """Return the attention of queries `[T, heads, lead + head_dim]`: `[T, heads, value_dim]`.

    `keys`, `values` and `leads` have the shapes that `attend_part_kernel` names. The result of a query has the same
    bits whatever other queries, rows and blocks the plan has. Queries after the plan's are padding, whose output is
    zero.
    """
    launch: PartsLaunch = plan.cached(("parts", shape), lambda: PartsLaunch(plan, shape))
    query = aligned(query)
    tokens, heads, _ = query.shape
    with on_device(query.device):
        outs = [_attend_range(launch, part, query, keys, values, leads, params) for part in launch.ranges]
    if tokens > plan.num_queries:
        outs.append(query.new_zeros(tokens - plan.num_queries, heads, shape.value_dim))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_range(
    launch: PartsLaunch,
    queries: _QueryRange,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    leads: Tensor,
    params: AttentionParams,
) -> Tensor:
    shape = launch.shape
    tiling = launch.tiling
    buffers = launch.buffers
    number = queries.number
    heads = query.shape[1]
    group_tile = tiling.group_tile(shape.groups)
    head_tiles = shape.num_kv_heads * -(-shape.groups // group_tile)
    new = torch.empty(0, dtype=torch.float32, device=query.device).new_empty
    part_out = new(queries.num_slots, heads, shape.value_dim)
    part_lse = new(queries.num_slots, heads)
    cos, sin = launch.tables[number]
    pairs = [buffers[f"{name} {number}"] for name in ("query", "lo", "hi", "slot")]
    attend_part_kernel[(queries.num_items, head_tiles)](
        query, keys, values, leads, buffers[f"items {number}"], buffers["gathered"], *pairs, cos, sin,
        part_out, part_lse, shape.num_kv_heads, int(launch.rotates), params.scale, params.softcap or 0.0,
        GROUPS=shape.groups, GROUP_TILE=group_tile, **dim_constants(shape.head_dim, shape.value_dim),
        LEAD=shape.lead, BLOCK_L=block_size(shape.lead), BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, PART=PART,
        HALF=cos.shape[1], INTERLEAVED=shape.rotary is not None and shape.rotary.interleaved,
        SOFTCAP=params.softcap is not None, PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    out = query.new_empty(queries.stop - queries.first, heads, shape.value_dim)
    merge_kernel[(len(out), heads)](
        part_out, part_lse, buffers[f"merge_start {number}"], buffers[f"merge_slot {number}"],
        part_lse if params.sinks is None else params.sinks, out, heads, DIM_V=shape.value_dim,
        BLOCK_V=block_size(shape.value_dim), SINKS=params.sinks is not None, BLOCK_S=_PARTS_PER_STEP, num_warps=2,
    )  # fmt: skip
    return out


def _gathered(tiles: Tiles) -> np.ndarray:
    """Return origin, capacity and index of the earlier keys of all blocks' first parts: int64 `[G, 3]`."""
    origin, capacity, first, counts = tiles.pieces.T
    piece = np.repeat(np.arange(len(counts)), counts)
    index = first[piece] + np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]
    return np.stack((origin[piece], capacity[piece], index), axis=1)


def _cut(
    plan: AttentionPlan, tiles: Tiles, shape: LayerShape, tiling: Tiling, arrays: dict[str, np.ndarray]
) -> list[_QueryRange]:
    """Cut the queries of a plan into ranges, and add their arrays to `arrays`."""
    query = plan.pair_query[tiles.pairs]
    group = np.repeat(np.arange(len(tiles.origin)), np.diff(tiles.first_pair))
    first_gathered = np.cumsum(tiles.before) - tiles.before
    first_part = tiles.lo // PART
    stop_part = -(-tiles.hi // PART)
    num_parts = stop_part - first_part

    # Slots of a query are consecutive, in the order of positions.
    by_query = np.argsort(query, kind="stable")
    slot = np.empty_like(query)
    slot[by_query] = np.cumsum(num_parts[by_query]) - num_parts[by_query]
    per_query = np.bincount(query, weights=num_parts, minlength=plan.num_queries).astype(np.int64)
    merge_start = np.concatenate(([0], np.cumsum(per_query)))
    slot_bytes = 4 * shape.groups * shape.num_kv_heads * (shape.value_dim + 1)
    bounds = _bounds(merge_start, max(1, MAX_PARTIAL_BYTES // slot_bytes))

    per_tile = tiling.block_m // tiling.group_tile(shape.groups)
    ranges = []
    for number, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        pairs = np.flatnonzero((query >= first) & (query < stop))
        of_pair = group[pairs]
        in_group = np.arange(len(pairs)) - np.searchsorted(of_pair, of_pair)
        first_pair = np.flatnonzero(in_group % per_tile == 0)
        num_pairs = np.diff(first_pair, append=len(pairs))
        begin = np.minimum.reduceat(first_part[pairs], first_pair)
        end = np.maximum.reduceat(stop_part[pairs], first_pair)
        counts = end - begin
        tile = np.repeat(np.arange(len(counts)), counts)
        part = begin[tile] + np.arange(len(tile)) - (np.cumsum(counts) - counts)[tile]
        of_item = of_pair[first_pair][tile]
        columns = (  # in the order of `ITEM_FIELDS`
            tiles.origin[of_item],
            tiles.capacity[of_item],
            tiles.first[of_item],
            tiles.before[of_item],
            first_gathered[of_item],
            part,
            first_pair[tile],
            num_pairs[tile],
        )
        first_slot = merge_start[first]
        num_slots = int(merge_start[stop] - first_slot)
        arrays[f"items {number}"] = np.stack(columns, axis=1).reshape(-1)
        arrays[f"query {number}"] = query[pairs]
        arrays[f"lo {number}"] = tiles.lo[pairs]
        arrays[f"hi {number}"] = tiles.hi[pairs]
        arrays[f"slot {number}"] = slot[pairs] - first_slot - first_part[pairs]
        arrays[f"delta {number}"] = plan.pair_delta[tiles.pairs[pairs]]
        arrays[f"merge_start {number}"] = merge_start[first : stop + 1] - first_slot
        arrays[f"merge_slot {number}"] = np.arange(num_slots)
        ranges.append(_QueryRange(number, first, stop, len(tile), num_slots))
    return ranges


def _bounds(merge_start: np.ndarray, max_slots: int) -> list[int]:
    """Cut queries into ranges of at most `max_slots` partial results, or of one query."""
    bounds = [0]
    while bounds[-1] < len(merge_start) - 1:
        limit = merge_start[bounds[-1]] + max_slots
        stop = int(np.searchsorted(merge_start, limit, side="right")) - 1
        bounds.append(max(stop, bounds[-1] + 1))
    return bounds
