"""From an AttentionPlan to the few dense attention calls that carry it out (Hydragen, sections 3.1 to 3.3).

All queries that see a block meet it in one call; blocks of equal shape that lie evenly spaced in the arena, such as
the suffixes of many completions, share one batched call; a long run of new tokens becomes a full part and a plain
causal part, so that no mask is built for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_parallel.kernels.plan import AttentionPlan, Growth, Memo

CAUSAL_RUN = 16
"""New tokens of one row from which a causal call of its own is cheaper than a mask."""
MASK_TILE = 256
"""Queries per call where a mask is needed: a sliding window then touches a band of keys, not all of them."""
PADDED_KEYS = 4096
"""Keys that a batched call may read in vain, beyond as many again as it needs."""


MERGE_INDEX = "merge index"
"""What a schedule remembers under this name, and a device, depends on `merge` alone."""


@dataclass(frozen=True, eq=False)
class Call:
    """One dense attention call: N evenly spaced runs of L keys, each met by M queries.

    `pairs` are indices `[N * M]` into the plan's pair arrays, -1 where a run stands in for a gap in the spacing and
    its result is dropped. `origin` and `spacing` are in slots, `first` is the row of the first key in its extent.
    `lo` and `hi` `[N, M]` bound the visible keys, counted from `first`; both are None where all L are visible or the
    call is `causal` (then N = 1 and M = L). `growth` says by how many keys the beginning and the end of every run move
    in one more decode step, None where that is not one number each.
    """

    pairs: np.ndarray
    num_blocks: int
    num_keys: int
    origin: int
    spacing: int
    capacity: int
    first: int
    causal: bool = False
    lo: np.ndarray | None = None
    hi: np.ndarray | None = None
    growth: tuple[int, int] | None = None

    @property
    def num_queries(self) -> int:
        """Queries M that meet each run of keys."""
        return len(self.pairs) // self.num_blocks

    def grown(self) -> Call | None:
        """The call over the keys of one more decode step; None if it cannot go on or leaves a query without any."""
        if self.growth is None:
            return None
        begin, end = self.growth
        if begin == end == 0:
            return self
        num_keys = self.num_keys + end - begin
        hi = None if self.hi is None else self.hi + end - begin
        if num_keys < 1 or (hi is not None and self.lo is not None and (hi <= self.lo).any()):
            return None
        return replace(self, first=self.first + begin, num_keys=num_keys, hi=hi)


@dataclass(frozen=True, eq=False)
class Schedule(Memo):
    """The calls of a plan and how their results are put together.

    `merge` is `int64 [K, T]`: for each query the positions of its K partial results in the concatenated results of
    the calls, padded with -1. `in_order` says that it reads them just as they lie, each call holding all queries.
    `growth` is that of the plan, from which the calls have theirs.
    """

    calls: list[Call]
    merge: np.ndarray
    in_order: bool
    growth: Growth | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def following(self, plan: AttentionPlan) -> Schedule | None:
        """The schedule of the next decode step's plan: the same calls over other runs of keys."""
        calls = [grown for call in self.calls if (grown := call.grown()) is not None]
        if len(calls) < len(self.calls):
            return None
        if plan.growth is not self.growth:
            calls = [_with_growth(plan, call) for call in calls]
        known: dict[Hashable, Any] = {
            key: value for key, value in self._memo.items() if isinstance(key, tuple) and key[0] == MERGE_INDEX
        }
        return replace(self, calls=calls, growth=plan.growth, _memo=known)


def make_schedule(plan: AttentionPlan) -> Schedule:
    """Split a plan into dense calls.

    Raises
    ------
    ValueError
        If a query sees no key at all.
    """
    calls: list[Call] = []
    flat: list[Call] = []
    bounds = plan.block_pairs.tolist()
    for block in range(plan.num_blocks):
        if bounds[block + 1] - bounds[block] == 1:  # a row's own block in a decode step: the usual case, kept short
            flat += _single_call(plan, block, bounds[block])
            continue
        pairs = np.arange(bounds[block], bounds[block + 1])
        pairs = pairs[plan.pair_lo[pairs] < plan.pair_hi[pairs]]
        runs, rest = _causal_runs(plan, pairs)
        for run in runs:
            calls += _causal_calls(plan, block, run)
        if len(rest):
            flat += _flat_calls(plan, block, rest)
    calls += _batch(flat)
    return _with_merge(plan, [_with_growth(plan, call) for call in calls])


def _causal_runs(plan: AttentionPlan, pairs: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Separate the long runs of pairs whose visible end grows by one from query to query."""
    if len(pairs) < CAUSAL_RUN:
        return [], pairs
    steps = (np.diff(plan.pair_hi[pairs]) == 1) & (np.diff(plan.pair_query[pairs]) == 1)
    pieces = np.split(pairs, np.flatnonzero(~steps) + 1)
    runs = [piece for piece in pieces if len(piece) >= CAUSAL_RUN]
    rest = [piece for piece in pieces if len(piece) < CAUSAL_RUN]
    return runs, np.concatenate(rest) if rest else pairs[:0]


def _causal_calls(plan: AttentionPlan, block: int, run: np.ndarray) -> list[Call]:
    """A full part over the keys before the run and a causal part over its own; tiles with a mask under a window."""
    lo, hi = plan.pair_lo[run], plan.pair_hi[run]
    if lo[0] != lo[-1]:
        tiles = np.split(run, np.arange(MASK_TILE, len(run), MASK_TILE))
        return [_call(plan, block, tile) for tile in tiles]
    own = int(hi[0]) - 1
    calls = []
    if own > lo[0]:
        calls.append(_call(plan, block, run, int(lo[0]), own, masked=False))
    if lo[0] <= own:
        calls.append(_call(plan, block, run, own, own + len(run), masked=False, causal=True))
    return calls


def _single_call(plan: AttentionPlan, block: int, pair: int) -> list[Call]:
    """What `_flat_calls` gives for one pair, which sees all keys between its bounds or none."""
    lo, hi = int(plan.pair_lo[pair]), int(plan.pair_hi[pair])
    if lo >= hi:
        return []
    origin, capacity = int(plan.block_origin[block]), int(plan.block_capacity[block])
    return [Call(np.array([pair]), 1, hi - lo, origin, 0, capacity, int(plan.block_first[block]) + lo)]


def _flat_calls(plan: AttentionPlan, block: int, pairs: np.ndarray) -> list[Call]:
    lo, hi = plan.pair_lo[pairs], plan.pair_hi[pairs]
    if (lo == lo[0]).all() and (hi == hi[0]).all():
        return [_call(plan, block, pairs, masked=False)]
    return [_call(plan, block, tile) for tile in np.split(pairs, np.arange(MASK_TILE, len(pairs), MASK_TILE))]


def _call(
    plan: AttentionPlan,
    block: int,
    pairs: np.ndarray,
    start: int | None = None,
    stop: int | None = None,
    *,
    masked: bool = True,
    causal: bool = False,
) -> Call:
    """A call over one block; its keys are those that any of its queries sees unless given."""
    lo, hi = plan.pair_lo[pairs], plan.pair_hi[pairs]
    start = int(lo.min()) if start is None else start
    stop = int(hi.max()) if stop is None else stop
    return Call(
        pairs=pairs,
        num_blocks=1,
        num_keys=stop - start,
        origin=int(plan.block_origin[block]),
        spacing=0,
        capacity=int(plan.block_capacity[block]),
        first=int(plan.block_first[block]) + start,
        causal=causal,
        lo=(lo - start)[None] if masked else None,
        hi=(hi - start)[None] if masked else None,
    )


def _batch(calls: list[Call]) -> list[Call]:
    """Join calls of equal shape over evenly spaced extents into batched ones."""
    shapes: dict[tuple[int, int], list[Call]] = {}
    for call in calls:
        shapes.setdefault((call.num_queries, call.capacity), []).append(call)
    out: list[Call] = []
    for alike in shapes.values():
        alike.sort(key=lambda call: call.origin)
        places = np.array([(call.origin, call.first, call.first + call.num_keys) for call in alike]).T
        begin = 0
        while begin < len(alike):
            count, spacing = _evenly_spaced(*places[:, begin:])
            out.append(_join(alike[begin : begin + count], spacing) if count > 1 else alike[begin])
            begin += count
    return out


def _evenly_spaced(origins: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[int, int]:
    """How many of the first calls one batched call can serve, and at what spacing.

    Extents that are missing from the spacing are bridged while they are fewer than those that are there, and keys are
    read in vain while they are few (`PADDED_KEYS`).

    Parameters
    ----------
    origins, begins, ends : int64 [calls]
        The extent of each call, ascending, and the rows of it that the call reads.
    """
    gaps = np.diff(origins)
    if not len(gaps) or gaps[0] <= 0:  # a call alone, or two calls over one extent
        return 1, 0
    spacing = int(gaps[0])
    slots = np.cumsum(gaps // spacing) + 1  # of the first two calls, the first three, ...
    even = (gaps % spacing == 0) & (gaps > 0) & (slots <= 2 * np.arange(2, len(origins) + 1))
    longest = np.maximum.accumulate(ends)[1:] - np.minimum.accumulate(begins)[1:]
    fits = longest * slots <= 2 * np.cumsum(ends - begins)[1:] + PADDED_KEYS
    joined = np.flatnonzero(fits & np.logical_and.accumulate(even))
    return (int(joined[-1]) + 2, spacing) if len(joined) else (1, 0)


def _join(calls: list[Call], spacing: int) -> Call:
    first = min(call.first for call in calls)
    num_keys = max(call.first + call.num_keys for call in calls) - first
    origin, width = calls[0].origin, calls[0].num_queries
    num_blocks = (calls[-1].origin - origin) // spacing + 1
    pairs = np.full((num_blocks, width), -1, dtype=np.int64)
    lo = np.zeros((num_blocks, width), dtype=np.int64)
    hi = np.full((num_blocks, width), num_keys, dtype=np.int64)
    for call in calls:
        slot, shift = (call.origin - origin) // spacing, call.first - first
        pairs[slot] = call.pairs
        lo[slot] = shift if call.lo is None else call.lo[0] + shift
        hi[slot] = shift + call.num_keys if call.hi is None else call.hi[0] + shift
    masked = bool(lo.any() or (hi != num_keys).any())
    return Call(
        pairs=pairs.reshape(-1),
        num_blocks=num_blocks,
        num_keys=num_keys,
        origin=origin,
        spacing=spacing,
        capacity=calls[0].capacity,
        first=first,
        lo=lo if masked else None,
        hi=hi if masked else None,
    )


def _with_growth(plan: AttentionPlan, call: Call) -> Call:
    """Note how the keys of a call move in the next decode step."""
    if plan.growth is None or call.causal:
        return call
    pairs = call.pairs[call.pairs >= 0]
    moves = [np.zeros(1, np.int64) if grows is None else grows[pairs] for grows in (plan.growth.lo, plan.growth.hi)]
    alike = all((move == move[0]).all() for move in moves)
    return replace(call, growth=(int(moves[0][0]), int(moves[1][0])) if alike else None)


def _with_merge(plan: AttentionPlan, calls: list[Call]) -> Schedule:
    """Find, for each query, where its partial results lie."""
    pairs = np.concatenate([call.pairs for call in calls]) if calls else np.empty(0, np.int64)
    places = np.flatnonzero(pairs >= 0)
    queries = plan.pair_query[pairs[places]]
    order = np.argsort(queries, kind="stable")
    places, queries = places[order], queries[order]
    counts = np.bincount(queries, minlength=plan.num_queries)
    if plan.num_queries and counts.min() == 0:
        raise ValueError(f"query {int(counts.argmin())} of the pass sees no key")
    rank = np.arange(len(queries)) - np.repeat(np.cumsum(counts) - counts, counts)
    merge = np.full((int(counts.max(initial=0)), plan.num_queries), -1, dtype=np.int64)
    merge[rank, queries] = places
    in_order = merge.size == len(pairs) and np.array_equal(merge.reshape(-1), np.arange(len(pairs)))
    return Schedule(calls, merge, in_order, plan.growth)
