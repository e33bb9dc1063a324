"""Layout: an example as a few masked attentions (docs/training.md).

Most keys have one position in all views of rows. Others are seen at several positions, such as the steps that Hogwild!
workers are writing. A `LayoutView` holds keys rotated to one set of positions, and for each query its position relative
to them. Attention over several views is merged by log-sum-exp, as for the blocks of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_parallel.training.example import ParallelExample


@dataclass(frozen=True, eq=False)
class LayoutView:
    """Queries and keys of one masked attention. A query sees up to `G` intervals of the keys."""

    queries: np.ndarray  # int64 [Q], ascending
    query_positions: np.ndarray  # int64 [Q]
    begins: np.ndarray  # int64 [Q, G], first key of each interval
    ends: np.ndarray  # int64 [Q, G], after its last key; 0: no interval
    keys: np.ndarray  # int64 [K]
    key_positions: np.ndarray  # int64 [K]

    def mask(self, window: int | None = None) -> np.ndarray:
        """Return which keys each query sees, `bool [Q, K]`; `window` as in `AttentionParams`."""
        keys = np.arange(len(self.keys))
        seen = np.zeros((len(self.queries), len(keys)), bool)
        for begin, end in zip(self.begins.T, self.ends.T, strict=True):
            seen |= (begin[:, None] <= keys) & (keys < end[:, None])
        if window is not None:
            seen &= self.query_positions[:, None] - self.key_positions < window
        return seen


class _Seen(NamedTuple):
    """A block in the view of a segment."""

    block: int
    start: int  # in the view
    stop: int


class _ViewPart(NamedTuple):
    """Blocks that a segment sees in one view of the layout."""

    segment: int
    shift: int  # added to positions in the segment's view
    blocks: Sequence[_Seen]


def make_views(example: ParallelExample) -> list[LayoutView]:
    """Return the views of an example. The first holds the keys at fixed positions; without moves there is no other."""
    segments = list(_segments(example))
    fixed = _fixed_starts(segments)
    contents = np.split(example.block_tokens, np.cumsum(example.block_lengths)[:-1])
    home: dict[int, int] = {}  # position of each token of a fixed block
    for block, start in fixed.items():
        for offset, token in enumerate(contents[block].tolist()):
            home[token] = start + offset
    stops_of: dict[int, set[int]] = defaultdict(set)  # lengths at which each block is seen
    for view in segments:
        for seen in view:
            stops_of[seen.block].add(seen.stop)
    parts: dict[int, list[_ViewPart]] = defaultdict(list)  # by view
    colors: dict[int, int] = {}
    for index, view in enumerate(segments):
        settled: list[_Seen] = []
        moved: list[_Seen] = []
        for seen in view:
            first_token = int(contents[seen.block][0])
            is_settled = seen.start == fixed.get(seen.block, home.get(first_token))
            (settled if is_settled else moved).append(seen)
        parts[0].append(_ViewPart(index, 0, settled))
        pieces: list[list[_Seen]] = [[]]
        for seen in moved:
            pieces[-1].append(seen)
            if len(stops_of[seen.block]) > 1:  # it grows
                pieces.append([])
        pieces = [piece for piece in pieces if piece]
        chosen = _choose(colors, [piece[-1].block for piece in pieces])
        for piece, color in zip(pieces, chosen, strict=True):
            parts[color].append(_ViewPart(index, -piece[-1].start, piece))
    views = []
    for _, of_view in sorted(parts.items()):
        if any(part.blocks for part in of_view):
            views.append(_make_view(example, contents, of_view))
    return views


def _segments(example: ParallelExample) -> Iterator[list[_Seen]]:
    """Yield the blocks that each segment sees."""
    blocks = example.view_blocks.tolist()
    starts = example.view_starts.tolist()
    stops = example.view_stops.tolist()
    seen = list(map(_Seen, blocks, starts, stops))
    begin = 0
    for length in example.view_lengths.tolist():
        yield seen[begin : begin + length]
        begin += length


def _fixed_starts(segments: Sequence[Sequence[_Seen]]) -> dict[int, int]:
    """Return the blocks that all segments see at the same place of their views, with that place."""
    # A step that has become the history counts too: it is seen at several places only while a worker writes it
    seen_at: dict[int, list[_Seen]] = defaultdict(list)
    for view in segments:
        for seen in view:
            seen_at[seen.block].append(seen)
    fixed = {}
    for block, uses in seen_at.items():
        starts = {seen.start for seen in uses}
        length = max(seen.stop for seen in uses)
        final_starts = [seen.start for seen in uses if seen.stop == length]
        is_history = len(final_starts) > 1 and len(set(final_starts)) == 1
        if len(starts) == 1 or is_history:
            fixed[block] = final_starts[0]
    return fixed


def _choose(colors: dict[int, int], blocks: Sequence[int]) -> list[int]:
    """Assign blocks to views, in `colors`, so that no segment sees two blocks in the same one."""
    chosen: list[int] = []
    for block in blocks:
        color = colors.get(block)
        if color is None or color in chosen:
            taken = {colors.get(other) for other in blocks if other != block}
            taken.update(chosen)
            color = next(candidate for candidate in range(1, 2 + 2 * len(blocks)) if candidate not in taken)
            colors.setdefault(block, color)
        chosen.append(color)
    return chosen


def _make_view(example: ParallelExample, contents: Sequence[np.ndarray], parts: Sequence[_ViewPart]) -> LayoutView:
    parts = [part for part in parts if part.blocks]
    stops: dict[tuple[int, int], int] = {}  # keys of each block, by block and start, in order of appearance
    for part in parts:
        for seen in part.blocks:
            group = (seen.block, seen.start + part.shift)
            stops[group] = max(stops.get(group, 0), seen.stop)
    begins = dict(zip(stops, np.cumsum([0, *stops.values()]).tolist(), strict=False))
    firsts = np.cumsum([0, *example.segment_lengths]).tolist()
    lengths = example.segment_lengths.tolist()
    starts = example.segment_positions.tolist()
    queries = []
    positions = []
    rows = []
    for part in parts:
        num_tokens = lengths[part.segment]
        start = starts[part.segment]
        queries.append(firsts[part.segment] + np.arange(num_tokens))
        positions.append(start + part.shift + np.arange(num_tokens))
        rows.append(_intervals(part, start, num_tokens, begins))
    shape = (sum(map(len, queries)), max(map(len, rows)))
    first_keys = np.zeros(shape, np.int64)
    end_keys = np.zeros(shape, np.int64)
    begin = 0
    for query, intervals in zip(queries, rows, strict=True):
        end = begin + len(query)
        for slot, (first_key, end_key) in enumerate(intervals):
            first_keys[begin:end, slot] = first_key
            end_keys[begin:end, slot] = end_key
        begin = end
    return LayoutView(
        queries=np.concatenate(queries),
        query_positions=np.concatenate(positions),
        begins=first_keys,
        ends=end_keys,
        keys=np.concatenate([contents[block][:stop] for (block, _), stop in stops.items()]),
        key_positions=np.concatenate([start + np.arange(stop) for (_, start), stop in stops.items()]),
    )


def _intervals(
    part: _ViewPart, start: int, n: int, begins: dict[tuple[int, int], int]
) -> list[tuple[int, np.ndarray | int]]:
    """Return the keys that a segment of `n` tokens sees: pairs of a first key and the key after the last, int or [n].

    Blocks whose keys follow each other make one interval. Blocks end at `start` or before, but for the segment's own.
    """
    intervals: list[tuple[int, np.ndarray | int]] = []
    for seen in part.blocks:
        begin = begins[seen.block, seen.start + part.shift]
        end: np.ndarray | int = begin + seen.stop
        if seen.start + seen.stop > start + 1:
            visible = start - seen.start + 1 + np.arange(n)
            end = begin + np.minimum(seen.stop, visible)
        if intervals:
            previous_begin, previous_end = intervals[-1]
            if isinstance(previous_end, int) and previous_end == begin:
                begin = previous_begin
                intervals.pop()
        intervals.append((begin, end))
    return intervals
