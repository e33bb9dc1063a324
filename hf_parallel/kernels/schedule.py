"""Schedule: the few dense attention calls that compute an AttentionPlan (Hydragen, sections 3.1 to 3.3).

All queries that see a block attend to it in one call. Blocks of equal shape that are evenly spaced in the arena, such
as the suffixes of many completions, share one batched call. A long run of new tokens is split into a call over the
keys before it and a causal call, so that no mask is built for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import torch

from hf_parallel.kernels.plan import AttentionPlan, Derived
from hf_parallel.kernels.storage import FIRST_QUANTIZED

CAUSAL_RUN = 16  # new tokens of one row from which a causal call of its own is cheaper than a mask
MASK_TILE = 256  # queries per masked call, so that under a sliding window a call reads a band of keys, not all
PADDED_KEYS = 4096  # unused keys read by a batched call: at most this many more than used ones

MergeIndex = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class DenseCall:
    """One dense attention call: N blocks of L keys, each with M queries.

    `origin`, `spacing` (from extent to extent) and `capacity` are in slots. Visible keys are `lo <= j < hi`, counted
    from `first`; `lo` and `hi` are None if all L keys are visible or the call is causal (query `i` sees keys up to `i`;
    then N = 1 and M = L).
    """

    pairs: np.ndarray  # int64 [N * M], indices into the plan's pairs; -1 for a gap, whose result is dropped
    num_blocks: int  # N
    num_queries: int  # M
    num_keys: int  # L
    origin: int
    spacing: int
    capacity: int
    first: int  # index of the first key in its extent
    causal: bool = False
    lo: np.ndarray | None = None  # int64 [N, M]
    hi: np.ndarray | None = None
    increments: tuple[int, int] | None = None  # of the key range's start and end per decode step; None if pairs differ

    @property
    def is_quantized(self) -> bool:
        """Whether its keys and values are in 8 bits."""
        return self.origin >= FIRST_QUANTIZED


@dataclass(frozen=True, eq=False)
class Schedule(Derived):
    """The calls of a plan and how their results are merged."""

    calls: list[DenseCall]
    merge: np.ndarray  # int64 [K, T], index of each query's partial results in all calls' results, padded with -1
    in_order: bool  # whether `merge` is 0, 1, 2, ...: the results are K times all queries in order
    merge_indices: dict[torch.device, MergeIndex] = field(default_factory=dict, repr=False)  # shared by following steps

    def next_step(self, plan: AttentionPlan) -> Schedule | None:
        """Return the schedule of the next decode step: the same calls over its key ranges; None if a call has none."""
        calls = []
        for call in self.calls:
            if call.increments is None:
                return None
            start, end = call.increments
            if start or end:
                num_keys = call.num_keys + end - start
                hi = None if call.hi is None else call.hi + end - start
                if num_keys < 1:
                    return None
                if hi is not None and call.lo is not None and (hi <= call.lo).any():
                    return None
                call = replace(call, first=call.first + start, num_keys=num_keys, hi=hi)  # noqa: PLW2901
            calls.append(call)
        if plan.increments is not None and plan.increments.lo is not None:  # holds for one step only
            calls = [_with_increments(plan, call) for call in calls]
        return replace(self, calls=calls)

    def merge_index(self, device: torch.device) -> MergeIndex:
        """Return `merge` on a device, and a mask `[K, T, 1]` of missing results (None if every query has K)."""
        if device not in self.merge_indices:
            index = torch.from_numpy(self.merge).to(device)
            missing = (index < 0)[..., None]
            is_complete = not bool(missing.any())
            self.merge_indices[device] = index.clamp(min=0), None if is_complete else missing
        return self.merge_indices[device]


def make_schedule(plan: AttentionPlan) -> Schedule:
    """Split a plan into dense attention calls; raises ValueError if a query sees no key at all."""
    calls: list[DenseCall] = []
    flat: list[DenseCall] = []
    bounds = plan.block_pairs.tolist()
    for block in range(plan.num_blocks):
        pairs = np.arange(bounds[block], bounds[block + 1])
        if len(pairs) == 1:  # fast path: a row's own block in a decode step
            lo = int(plan.pair_lo[pairs[0]])
            hi = int(plan.pair_hi[pairs[0]])
            if lo < hi:
                flat.append(_call(plan, block, pairs, lo, hi))
            continue
        pairs = pairs[plan.pair_lo[pairs] < plan.pair_hi[pairs]]
        runs, other_pairs = _causal_runs(plan, pairs)
        for run in runs:
            calls += _causal_calls(plan, block, run)
        if len(other_pairs):
            flat += _flat_calls(plan, block, other_pairs)
    calls += _batch(flat)
    return _with_merge(plan, [_with_increments(plan, call) for call in calls])


def _causal_runs(plan: AttentionPlan, pairs: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Separate long causal runs (the visible end grows by one from query to query) from the other pairs."""
    if len(pairs) < CAUSAL_RUN:
        return [], pairs
    sees_one_more = np.diff(plan.pair_hi[pairs]) == 1
    is_next_query = np.diff(plan.pair_query[pairs]) == 1
    breaks = np.flatnonzero(~(sees_one_more & is_next_query)) + 1
    runs: list[np.ndarray] = []
    others: list[np.ndarray] = []
    for piece in np.split(pairs, breaks):
        (runs if len(piece) >= CAUSAL_RUN else others).append(piece)
    return runs, np.concatenate(others) if others else pairs[:0]


def _causal_calls(plan: AttentionPlan, block: int, run: np.ndarray) -> list[DenseCall]:
    """A full call over the keys before the run and a causal call over its own; masked tiles under a window."""
    if (plan.pair_lo[run] != plan.pair_lo[run[0]]).any():
        return _masked_calls(plan, block, run)
    lo = int(plan.pair_lo[run[0]])
    first = int(plan.pair_hi[run[0]]) - 1  # the key of the first query itself
    calls = []
    if first > lo:
        calls.append(_call(plan, block, run, lo, first))
    calls.append(_call(plan, block, run, first, first + len(run), causal=True))
    return calls


def _flat_calls(plan: AttentionPlan, block: int, pairs: np.ndarray) -> list[DenseCall]:
    """One call without a mask if all pairs see the same keys, masked tiles otherwise."""
    lo = plan.pair_lo[pairs]
    hi = plan.pair_hi[pairs]
    sees_same = (lo == lo[0]).all() and (hi == hi[0]).all()
    if not sees_same:
        return _masked_calls(plan, block, pairs)
    return [_call(plan, block, pairs, int(lo[0]), int(hi[0]))]


def _masked_calls(plan: AttentionPlan, block: int, pairs: np.ndarray) -> list[DenseCall]:
    """Calls over tiles of pairs that see different keys."""
    calls = []
    for tile in np.split(pairs, np.arange(MASK_TILE, len(pairs), MASK_TILE)):
        lo = plan.pair_lo[tile]
        hi = plan.pair_hi[tile]
        start = int(lo.min())
        end = int(hi.max())
        call = _call(plan, block, tile, start, end)
        calls.append(replace(call, lo=(lo - start)[None], hi=(hi - start)[None]))
    return calls


def _call(
    plan: AttentionPlan, block: int, pairs: np.ndarray, start: int, stop: int, *, causal: bool = False
) -> DenseCall:
    """A call without a mask over keys `start <= j < stop` of one block."""
    origin = int(plan.block_origin[block])
    capacity = int(plan.block_capacity[block])
    return DenseCall(
        pairs, 1, len(pairs), stop - start, origin, 0, capacity, int(plan.block_first[block]) + start, causal
    )


def _batch(calls: list[DenseCall]) -> list[DenseCall]:
    shapes: dict[tuple[int, int, bool], list[DenseCall]] = {}
    for call in calls:
        shape = (call.num_queries, call.capacity, call.origin >= FIRST_QUANTIZED)
        shapes.setdefault(shape, []).append(call)
    out: list[DenseCall] = []
    for alike in shapes.values():
        alike.sort(key=attrgetter("origin"))
        origins = np.array([call.origin for call in alike])
        starts = np.array([call.first for call in alike])
        ends = starts + np.array([call.num_keys for call in alike])
        begin = 0
        while begin < len(alike):
            count, spacing = _evenly_spaced(origins[begin:], starts[begin:], ends[begin:])
            if count > 1:
                joined = slice(begin, begin + count)
                first = int(starts[joined].min())
                num_keys = int(ends[joined].max()) - first
                out.append(_join(alike[joined], spacing, first, num_keys))
            else:
                out.append(alike[begin])
            begin += count
    return out


def _evenly_spaced(origins: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[int, int]:
    """Return the number of leading calls that one batched call can replace, and their spacing.

    Takes the extents' origins, ascending, and the range of each that its call reads: int64 `[calls]`. The batch
    may contain gaps, at most as many as extents, and may read a limited number of unused keys (`PADDED_KEYS`).
    """
    gaps = np.diff(origins)
    if not len(gaps) or gaps[0] <= 0:  # a single call, or two calls over one extent
        return 1, 0
    spacing = int(gaps[0])
    slots = np.cumsum(gaps // spacing) + 1  # extents and gaps of the first two calls, the first three, ...
    most_slots = 2 * np.arange(2, len(origins) + 1)
    even = (gaps % spacing == 0) & (gaps > 0) & (slots <= most_slots)
    longest = np.maximum.accumulate(ends)[1:] - np.minimum.accumulate(starts)[1:]
    fits = longest * slots <= 2 * np.cumsum(ends - starts)[1:] + PADDED_KEYS
    joined = np.flatnonzero(fits & np.logical_and.accumulate(even))
    if not len(joined):
        return 1, 0
    return int(joined[-1]) + 2, spacing


def _join(calls: list[DenseCall], spacing: int, first: int, num_keys: int) -> DenseCall:
    """One batched call in place of calls over evenly spaced blocks, which reads the same range of keys in each."""
    origin = calls[0].origin
    width = calls[0].num_queries
    num_blocks = (calls[-1].origin - origin) // spacing + 1
    pairs = np.full((num_blocks, width), -1, dtype=np.int64)
    lo = np.zeros((num_blocks, width), dtype=np.int64)
    hi = np.full((num_blocks, width), num_keys, dtype=np.int64)
    for call in calls:
        slot = (call.origin - origin) // spacing
        shift = call.first - first
        pairs[slot] = call.pairs
        first_key: np.ndarray | int = 0 if call.lo is None else call.lo[0]
        end_key: np.ndarray | int = call.num_keys if call.hi is None else call.hi[0]
        lo[slot] = shift + first_key
        hi[slot] = shift + end_key
    is_masked = bool(lo.any() or (hi != num_keys).any())
    return replace(
        calls[0],
        num_blocks=num_blocks,
        num_keys=num_keys,
        spacing=spacing,
        first=first,
        pairs=pairs.reshape(-1),
        lo=lo if is_masked else None,
        hi=hi if is_masked else None,
    )


def _with_increments(plan: AttentionPlan, call: DenseCall) -> DenseCall:
    """Add the increments of the call's key range; None if they differ between its pairs."""
    step = plan.increments
    if step is None or call.causal:
        return call
    pairs = call.pairs[call.pairs >= 0]
    start = np.zeros(1, np.int64) if step.lo is None else step.lo[pairs]
    end = step.hi[pairs]
    increments = None
    if (start == start[0]).all() and (end == end[0]).all():
        increments = (int(start[0]), int(end[0]))
    return replace(call, increments=increments)


def _with_merge(plan: AttentionPlan, calls: list[DenseCall]) -> Schedule:
    """Return the schedule of calls, with the index by which the results of each query are merged."""
    pairs = np.empty(0, np.int64)
    if calls:
        pairs = np.concatenate([call.pairs for call in calls])
    results = np.flatnonzero(pairs >= 0)
    queries = plan.pair_query[pairs[results]]
    order = np.argsort(queries, kind="stable")
    results = results[order]
    queries = queries[order]
    counts = plan.count_by_query(queries)
    rank = np.arange(len(queries)) - np.repeat(np.cumsum(counts) - counts, counts)
    merge = np.full((int(counts.max(initial=0)), plan.num_queries), -1, dtype=np.int64)
    merge[rank, queries] = results
    in_order = np.array_equal(merge.reshape(-1), np.arange(len(pairs)))
    return Schedule(calls, merge, in_order)
