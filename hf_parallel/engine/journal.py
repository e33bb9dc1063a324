"""Journal: the forward passes of a request and the copies of its blocks, from which its keys and values are rebuilt.

A preempted request loses its keys and values. `rebuild` computes them again from their tokens and positions. Passes
between which no tokens were moved or removed are computed as one (`BlockCache.prepare_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_parallel.cache import Block, Segment, View
from hf_parallel.cache.trace import BlockCopy

RunPasses = Callable[[list[list[Segment]], torch.Tensor], None]
"""Runs consecutive passes over packed tokens `int64 [T]` as one."""


@dataclass(frozen=True, eq=False)
class DecodeRun:
    """Consecutive decode steps of the same rows, which all their requests record once.

    `rows` is the same object in each step, `ids` are the input tokens of each, `int64 [T]`.
    """

    rows: object
    ids: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass, or the decode steps of a run."""

    segments: list[tuple[tuple[Block, ...], int, bool]]  # view, number of tokens, whether they are stored
    lengths: dict[Block, int]  # of all blocks of the views, before the first step
    run: DecodeRun
    part: slice  # of the tokens of each step

    def steps(self) -> Iterator[tuple[dict[Block, int], torch.Tensor]]:
        """Yield the lengths before each step, and its tokens."""
        lengths = dict(self.lengths)
        for ids in self.run.ids:
            yield lengths, ids[self.part]
            for view, count, write in self.segments:
                lengths[view[-1]] += count if write else 0


class Journal:
    """Takes the place of a `Trace`: records passes and copies, and reports sampled tokens to `on_sample`."""

    def __init__(self, on_sample: Callable[[int, int], None]) -> None:
        self._events: list[_Pass | BlockCopy] = []
        self._on_sample = on_sample

    def record(
        self, passes: Sequence[Sequence[Segment]], ids: torch.Tensor, run: DecodeRun | None = None, begin: int = 0
    ) -> None:
        """Record passes that have been computed.

        A decode step is recorded with its run, in whose steps its tokens start at `begin`; the steps that follow need
        not be recorded.
        """
        appended: dict[Block, int] = {}
        for segments in passes:
            for segment in segments:
                target = segment.view[-1]
                appended[target] = appended.get(target, 0) + (segment.num_tokens if segment.write else 0)
        lengths = {block: block.length for segments in passes for segment in segments for block in segment.view}
        for block, count in appended.items():
            lengths[block] -= count
        end = 0
        for segments in passes:
            first, end = end, end + sum(segment.num_tokens for segment in segments)
            part = slice(first, end) if run is None else slice(begin + first, begin + end)
            entries = [(tuple(segment.view), segment.num_tokens, segment.write) for segment in segments]
            self._events.append(_Pass(entries, dict(lengths), run or DecodeRun(None, [ids]), part))
            for view, count, write in entries:
                lengths[view[-1]] += count if write else 0

    def add_copy(self, source: Block, start: int, stop: int, target: Block, at: int) -> None:
        """See `Trace.add_copy`."""
        if stop > start:
            self._events.append(BlockCopy(source, start, stop, target, at))

    def add_sample(self, row: int, token: int, segment: Segment | None, view: View) -> None:
        """See `Trace.add_sample`."""
        self._on_sample(row, token)

    def written(self) -> set[Block]:
        """Return all blocks that tokens were written to."""
        blocks = set()
        for event in self._events:
            if isinstance(event, BlockCopy):
                blocks.add(event.target)
            else:
                blocks |= {view[-1] for view, _, write in event.segments if write}
        return blocks

    def seen(self) -> set[Block]:
        """Return all blocks of the views."""
        return {block for event in self._events if isinstance(event, _Pass) for block in event.lengths}

    def rebuild(
        self,
        own: Collection[Block],
        chunk_size: int,
        run: RunPasses,
        copy: Callable[[BlockCopy], None],
    ) -> None:
        """Compute the tokens of the blocks `own` again, which are empty; all others are cached.

        `copy` copies tokens between blocks. At most `chunk_size` tokens are computed at once, unless a pass had more.
        """
        batch = _Batch(run)
        for event in self._events:
            if isinstance(event, BlockCopy):
                if event.target in own:
                    batch.flush()
                    event.target.length = event.at
                    copy(event)
                continue
            for before, packed in event.steps():
                lengths = {block: length for block, length in before.items() if block in own}
                if any(batch.length(block) != length for block, length in lengths.items()):
                    batch.flush()
                    for block, length in lengths.items():
                        if block.length < length:
                            raise RuntimeError(f"{block!r} cannot be rebuilt: {length} tokens are needed")
                        block.length = length
                segments, ids = _own_part(event, packed, own)
                if segments:
                    if batch.num_tokens + len(ids) > chunk_size:
                        batch.flush()
                    batch.add(segments, ids)
        batch.flush()


class _Batch:
    """Consecutive passes that will be computed as one."""

    def __init__(self, run: RunPasses) -> None:
        self._run = run
        self._clear()

    def _clear(self) -> None:
        self._passes: list[list[Segment]] = []
        self._ids: list[torch.Tensor] = []
        self._appended: dict[Block, int] = {}
        self.num_tokens = 0

    def length(self, block: Block) -> int:
        """Return the length that a block will have after the passes."""
        return block.length + self._appended.get(block, 0)

    def add(self, segments: list[Segment], ids: torch.Tensor) -> None:
        self._passes.append(segments)
        self._ids.append(ids)
        self.num_tokens += len(ids)
        for segment in segments:
            target = segment.view[-1]
            self._appended[target] = self._appended.get(target, 0) + segment.num_tokens

    def flush(self) -> None:
        if self._passes:
            passes, ids = self._passes, torch.cat(self._ids)
            self._clear()
            self._run(passes, ids)


def _own_part(event: _Pass, ids: torch.Tensor, own: Collection[Block]) -> tuple[list[Segment], Any]:
    """Return the segments that wrote to the request's own blocks, and their tokens."""
    kept, tokens = [], []
    parts = ids.split([count for _, count, _ in event.segments])
    for (view, count, write), part in zip(event.segments, parts, strict=True):
        if write and view[-1] in own:
            kept.append(Segment(view, count))
            tokens.append(part)
    return kept, torch.cat(tokens) if tokens else ids[:0]
