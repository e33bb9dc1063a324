"""Layout: an example as a few masked attentions (docs/training.md).

A key has one rotation wherever it is seen at a fixed distance from the beginning of a view. Blocks that are also seen
elsewhere, such as the steps that Hogwild! workers are writing, need another one. A `View` holds the keys of one
rotation, and for each query the position that makes all distances in it right. Attention over several views is merged
by log-sum-exp, as for the blocks of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_parallel.training.example import ParallelExample


@dataclass(frozen=True, eq=False)
class View:
    """Queries and keys of one masked attention. A query sees the keys of up to `G` groups, the first ones of each."""

    queries: np.ndarray  # int64 [Q], ascending
    query_positions: np.ndarray  # int64 [Q]
    query_groups: np.ndarray  # int64 [Q, G], -1: none
    query_stops: np.ndarray  # int64 [Q, G], number of keys of the group that the query sees
    keys: np.ndarray  # int64 [K]
    key_positions: np.ndarray  # int64 [K]
    key_groups: np.ndarray  # int64 [K]
    key_indices: np.ndarray  # int64 [K], in the group

    def mask(self, window: int | None = None) -> np.ndarray:
        """Return which keys each query sees, `bool [Q, K]`; `window` as in `AttentionParams`."""
        seen = np.zeros((len(self.queries), len(self.keys)), bool)
        for group, stop in zip(self.query_groups.T, self.query_stops.T, strict=True):
            seen |= (group[:, None] == self.key_groups) & (self.key_indices < stop[:, None])
        if window is not None:
            seen &= self.query_positions[:, None] - self.key_positions < window
        return seen


class _Seen(NamedTuple):
    """A block in the view of a segment."""

    block: int
    start: int  # in the view
    stop: int


class _Part(NamedTuple):
    """Blocks that a segment sees in one view of the layout."""

    segment: int
    shift: int  # added to positions in the segment's view
    blocks: Sequence[_Seen]


def make_views(example: ParallelExample) -> list[View]:
    """Return the views of an example. The first holds the keys at fixed positions; without moves there is no other."""
    segments = list(_segments(example))
    fixed = _fixed_starts(segments)
    contents = np.split(example.block_tokens, np.cumsum(example.block_lengths)[:-1])
    home = {int(t): fixed[b] + i for b in fixed for i, t in enumerate(contents[b].tolist())}
    growing = _growing(segments)
    parts: list[list[_Part]] = [[]]
    colors = _Colors()
    for index, view in enumerate(segments):
        settled = [s for s in view if s.start == fixed.get(s.block, home.get(int(contents[s.block][0])))]
        parts[0].append(_Part(index, 0, settled))
        pieces: list[list[_Seen]] = [[]]
        for seen in (s for s in view if s not in settled):
            pieces[-1].append(seen)
            if seen.block in growing:
                pieces.append([])
        pieces = [piece for piece in pieces if piece]
        for piece, color in zip(pieces, colors.choose([piece[-1].block for piece in pieces]), strict=True):
            while len(parts) <= color:
                parts.append([])
            parts[color].append(_Part(index, -piece[-1].start, piece))
    return [_make_view(example, contents, of_view) for of_view in parts if any(part.blocks for part in of_view)]


def _segments(example: ParallelExample) -> Iterator[list[_Seen]]:
    offsets = np.cumsum([0, *example.view_lengths]).tolist()
    columns = example.view_blocks.tolist(), example.view_starts.tolist(), example.view_stops.tolist()
    blocks = [_Seen(*row) for row in zip(*columns, strict=True)]
    for begin, end in zip(offsets, offsets[1:], strict=False):
        yield blocks[begin:end]


def _fixed_starts(segments: Sequence[Sequence[_Seen]]) -> dict[int, int]:
    """Return the blocks that all segments see at the same place of their views, with that place."""
    starts: dict[int, set[int]] = defaultdict(set)
    for view in segments:
        for seen in view:
            starts[seen.block].add(seen.start)
    return {block: min(values) for block, values in starts.items() if len(values) == 1}


def _growing(segments: Sequence[Sequence[_Seen]]) -> set[int]:
    lengths: dict[int, set[int]] = defaultdict(set)
    for view in segments:
        for seen in view:
            lengths[seen.block].add(seen.stop)
    return {block for block, values in lengths.items() if len(values) > 1}


class _Colors:
    """Assigns blocks to views, so that no segment sees two blocks in the same one."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def choose(self, blocks: Sequence[int]) -> list[int]:
        chosen: list[int] = []
        for block in blocks:
            color = self._of.get(block)
            if color is None or color in chosen:
                others = {self._of.get(other) for other in blocks if other != block}
                color = next(c for c in range(1, 2 + 2 * len(blocks)) if c not in chosen and c not in others)
                self._of.setdefault(block, color)
            chosen.append(color)
        return chosen


def _make_view(example: ParallelExample, contents: Sequence[np.ndarray], parts: Sequence[_Part]) -> View:
    firsts = np.cumsum([0, *example.segment_lengths])
    groups: dict[tuple[int, int], int] = {}
    stops: list[int] = []
    queries, positions, slots = [], [], []
    for part in parts:
        if not part.blocks:
            continue
        n, first = int(example.segment_lengths[part.segment]), int(firsts[part.segment])
        within = example.segment_positions[part.segment] + np.arange(n)
        queries.append(first + np.arange(n))
        positions.append(within + part.shift)
        row = []
        for seen in part.blocks:
            group = groups.setdefault((seen.block, seen.start + part.shift), len(groups))
            if group == len(stops):
                stops.append(0)
            stops[group] = max(stops[group], seen.stop)
            row.append((np.full(n, group), np.minimum(seen.stop, within - seen.start + 1)))
        slots.append(row)
    width = max(map(len, slots))
    lengths = [len(q) for q in queries]
    table = np.full((2, sum(lengths), width), -1, np.int64)
    begin = 0
    for n, row in zip(lengths, slots, strict=True):
        for slot, columns in enumerate(row):
            table[:, begin : begin + n, slot] = columns
        begin += n
    held = [(contents[block][:stop], shift, stop) for (block, shift), stop in zip(groups, stops, strict=True)]
    return View(
        queries=np.concatenate(queries),
        query_positions=np.concatenate(positions),
        query_groups=table[0],
        query_stops=table[1],
        keys=np.concatenate([tokens for tokens, _, _ in held]),
        key_positions=np.concatenate([shift + np.arange(stop) for _, shift, stop in held]),
        key_groups=np.repeat(np.arange(len(held)), stops),
        key_indices=np.concatenate([np.arange(stop) for stop in stops]),
    )
