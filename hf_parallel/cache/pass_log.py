"""PassLog: forward passes of a run and copies of tokens between its blocks, as integers.

It does not depend on the storage of the keys. `PassLog.freeze` follows tokens from block to block, so that the whole
run can be computed again in one pass, with gradients. `PassLog.recompute` computes the blocks of a preempted request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hf_parallel.cache.batch import ForwardPass, Segment, View
from hf_parallel.cache.pool import Block

Passes = tuple[list[list[Segment]], torch.Tensor]
"""Consecutive passes to be computed as one, and their packed tokens `int64 [T]`."""


class StepTokens(Protocol):
    """Token ids of a forward pass and the decode steps after it."""

    @property
    def ids(self) -> list[torch.Tensor]:
        """Packed tokens of each step, int64 `[T]`."""

    @property
    def segments(self) -> list[list[Segment]]:
        """Segments of each step, as the mode created them; only needed for samples."""


@dataclass(frozen=True, eq=False)
class LoggedSteps:
    """Token ids as they are computed. Requests that share passes share this object."""

    ids: list[torch.Tensor]
    segments: list[list[Segment]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _LoggedPass:
    """A pass and the steps that continue it: the part of them that belongs to one call."""

    segments: list[Segment]  # with their views at the time of the pass
    lengths: dict[Block, int]  # of all blocks of the views, before the first step
    bases: list[int]  # of the block to which each segment appends
    logged: StepTokens
    tokens: slice  # of each step
    first: int  # index of the first segment in a step

    def steps(self) -> Iterator[tuple[dict[Block, int], torch.Tensor]]:
        """Yield the lengths before each step, and its tokens."""
        lengths = dict(self.lengths)
        for ids in self.logged.ids:
            yield lengths, ids[self.tokens]
            _append(lengths, self.segments)


@dataclass(frozen=True)
class BlockCopy:
    """Tokens `start <= j < stop` of a block, which are from now on also in another one, from index `at` on."""

    source: Block
    start: int
    stop: int
    target: Block
    at: int


@dataclass(frozen=True)
class _Sample:
    row: int
    token: int
    segment: Segment | None  # whose last token the logits followed
    view: tuple[tuple[Block, int], ...]  # without a segment: blocks of the row, with their lengths


@dataclass(frozen=True, eq=False)
class FrozenLog:
    """A run as integers. Lists of arrays are ragged; tokens are numbered in the order in which they were computed."""

    input_ids: np.ndarray  # int64 [T]
    position_ids: np.ndarray  # int64 [T], to which the model rotated them
    contents: list[list[int]]  # of each block: the numbers of its tokens
    segments: list[tuple[int, int, int, list[tuple[int, int, int]]]]
    """First token, number of tokens, position of the first in its view, and the blocks of the view: number, start in
    the view, and length."""
    samples: list[tuple[int, int, int]]  # row, number of the token whose logits were sampled, sampled token


class PassLog:
    """Forward passes and copies of blocks in order, and the tokens that were sampled."""

    def __init__(self) -> None:
        self._events: list[_LoggedPass | BlockCopy] = []
        self._samples: list[_Sample] = []
        self._last: LoggedSteps | None = None  # of the last pass

    def add_pass(self, passes: Sequence[Sequence[Segment]], forward: ForwardPass, ids: torch.Tensor) -> None:
        """Record a forward pass over packed tokens `ids`, int64 `[T]`, computed for the given consecutive passes."""
        all_segments = [segment for segments in passes for segment in segments]
        if forward.continues and self._last is not None:
            self._last.ids.append(ids)
            self._last.segments.append(all_segments)
        else:
            self._last = LoggedSteps([ids], [all_segments])
            self.add_steps(passes, self._last)

    def add_steps(
        self, passes: Sequence[Sequence[Segment]], logged: StepTokens, begin: int = 0, is_computed: bool = True
    ) -> None:
        """Record passes whose tokens start at `begin` in each of the steps.

        `is_computed`: the blocks have the tokens of the first step.
        """
        lengths = {block: block.length for segments in passes for segment in segments for block in segment.view}
        if is_computed:
            for segments in passes:
                _append(lengths, segments, -1)
        first = 0
        for segments in passes:
            end = begin + sum(segment.num_tokens for segment in segments)
            frozen = [segment.frozen() for segment in segments]
            bases = [segment.view[-1].base for segment in segments]
            entry = _LoggedPass(frozen, dict(lengths), bases, logged, slice(begin, end), first)
            self._events.append(entry)
            _append(lengths, segments)
            begin = end
            first = first + len(segments)

    def add_copy(self, source: Block, start: int, stop: int, target: Block, at: int) -> None:
        """Record that tokens of a block were copied, or moved, to another block."""
        if stop > start:
            self._events.append(BlockCopy(source, start, stop, target, at))

    def add_sample(self, row: int, token: int, segment: Segment | None, view: View) -> None:
        """Record a token that a row sampled after the last token of `segment`, or of `view` if it has none yet."""
        lengths: tuple[tuple[Block, int], ...] = ()
        if segment is None:
            lengths = tuple((block, block.length) for block in view)
        self._samples.append(_Sample(row, token, segment, lengths))

    @property
    def state(self) -> tuple[int, int, int]:
        """Argument of `restore`: numbers of events, of steps of the last run, and of samples."""
        num_steps = 0 if self._last is None else len(self._last.ids)
        return len(self._events), num_steps, len(self._samples)

    def restore(self, state: tuple[int, int, int]) -> None:
        """Forget what was recorded since `state`."""
        events, steps, samples = state
        del self._events[events:], self._samples[samples:]
        self._last = None
        for event in reversed(self._events):
            if isinstance(event, _LoggedPass):
                assert isinstance(event.logged, LoggedSteps), "rows of a logged call do not stand"
                self._last = event.logged
                break
        if self._last is not None:
            del self._last.ids[steps:], self._last.segments[steps:]

    def needed(self, blocks: Collection[Block], cached: Collection[Block]) -> set[Block]:
        """Return the blocks that must be computed for `blocks`, themselves included, if others are `cached`."""
        seen = set(blocks)
        written = set()
        for event in reversed(self._events):
            if isinstance(event, BlockCopy):
                writes: list[tuple[Block, View]] = [(event.target, [event.source])]
            else:
                writes = [(segment.view[-1], segment.view) for segment in event.segments if segment.write]
                # Segments of a pass may see each other's blocks: the second round finds what the first needs late.
                writes *= 2
            for target, view in writes:
                if target in seen:
                    written.add(target)
                    seen.update(block for block in view if block not in cached)
        return written

    def seen(self) -> set[Block]:
        """Return all blocks of the views."""
        return {block for event in self._events if isinstance(event, _LoggedPass) for block in event.lengths}

    def recompute(self, own: Collection[Block], chunk_size: int, copy: Callable[[BlockCopy], None]) -> Iterator[Passes]:
        """Yield the passes that compute the tokens of the blocks `own` again, which are empty; all others are cached.

        The caller computes each before it asks for the next. Passes between which no tokens were moved or removed are
        one, of at most `chunk_size` tokens unless a pass had more. `copy` copies tokens between blocks.
        """
        batch = _Batch()
        for event in self._events:
            if isinstance(event, BlockCopy):
                if event.target in own:
                    yield from batch.flush()
                    event.target.length = event.at
                    copy(event)
                continue
            counts = [segment.num_tokens for segment in event.segments]
            for all_lengths, ids in event.steps():
                lengths = {block: length for block, length in all_lengths.items() if block in own}
                if any(batch.length(block) != length for block, length in lengths.items()):
                    yield from batch.flush()
                    for block, length in lengths.items():
                        if block.length < length:
                            raise RuntimeError(f"{block!r} cannot be recomputed: {length} tokens are needed")
                        block.length = length
                inputs = []
                count = 0
                for segment, part in zip(event.segments, ids.split(counts), strict=True):
                    if segment.write and segment.view[-1] in own:
                        inputs.append((segment, part))
                        count += len(part)
                if inputs:
                    if batch.num_tokens + count > chunk_size:
                        yield from batch.flush()
                    batch.add(inputs, count)
        yield from batch.flush()

    def freeze(self) -> FrozenLog:
        """Return the run as integers. Raises `ValueError` if it read tokens that an earlier call had computed."""
        return _Freezer().freeze(self._events, self._samples)


def _append(lengths: dict[Block, int], segments: Sequence[Segment], sign: int = 1) -> None:
    """Add the tokens of segments to the lengths of their blocks, or remove them."""
    for segment in segments:
        if segment.write:
            lengths[segment.view[-1]] += sign * segment.num_tokens


class _Batch:
    """Consecutive passes that will be recomputed as one."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._passes: list[list[Segment]] = []
        self._ids: list[torch.Tensor] = []
        self._appended: dict[Block, int] = {}
        self.num_tokens = 0

    def length(self, block: Block) -> int:
        """Return the length that a block will have after the passes."""
        return block.length + self._appended.get(block, 0)

    def add(self, inputs: Sequence[tuple[Segment, torch.Tensor]], count: int) -> None:
        """Add a pass of `count` tokens."""
        self._passes.append([segment for segment, _ in inputs])
        self.num_tokens += count
        for segment, ids in inputs:
            target = segment.view[-1]
            self._ids.append(ids)
            self._appended[target] = self._appended.get(target, 0) + segment.num_tokens

    def flush(self) -> Iterator[Passes]:
        """Yield the passes, if there are any, and begin again."""
        if self._passes:
            passes = self._passes
            ids = torch.cat(self._ids)
            self._clear()
            yield passes, ids


class _Freezer:
    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.positions: list[int] = []
        self.contents: list[list[int]] = []
        self.current: dict[Block, int] = {}  # number of the content that a block has now
        self.segments: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
        self.last_tokens: dict[int, int] = {}  # by id of a given segment

    def freeze(self, events: Sequence[_LoggedPass | BlockCopy], samples: Sequence[_Sample]) -> FrozenLog:
        for event in events:
            if isinstance(event, BlockCopy):
                source = self.contents[self.current[event.source]]
                self._write(event.target, event.at, source[event.start : event.stop])
                continue
            for segments, (lengths, ids) in zip(event.logged.segments, event.steps(), strict=True):
                self.ids.append(ids)
                self._add_pass(event, segments[event.first :], dict(lengths))
        taken = [(sample.row, self._origin(sample), sample.token) for sample in samples]
        tokens = torch.cat(self.ids).cpu().numpy() if self.ids else np.empty(0, np.int64)
        return FrozenLog(tokens, np.array(self.positions, np.int64), self.contents, self.segments, taken)

    def _add_pass(self, event: _LoggedPass, given: Sequence[Segment], lengths: dict[Block, int]) -> None:
        firsts = []
        _append(lengths, event.segments)
        for segment, base, original in zip(event.segments, event.bases, given, strict=False):
            target = segment.view[-1]
            count = segment.num_tokens
            first = len(self.positions)
            index = lengths[target] - count
            position = base + index
            self.positions += range(position, position + count)
            if segment.write:
                self._write(target, index, range(first, first + count))
            firsts.append(first)
            self.last_tokens[id(original)] = first + count - 1
        for segment, first in zip(event.segments, firsts, strict=True):
            start = 0
            view = []
            for block in segment.view:
                length = lengths[block]
                if length:
                    self._check_known(block, length)
                    view.append((self.current[block], start, length))
                start += length + block.shift  # which does not change while rows see tokens after the block
            position = start - segment.view[-1].shift - segment.num_tokens
            self.segments.append((first, segment.num_tokens, position, view))

    def _write(self, block: Block, index: int, tokens: Sequence[int]) -> None:
        """Write tokens to a block from an index on. Tokens that they replace stay visible to earlier queries."""
        content: list[int] = []
        is_new = block not in self.current
        if not is_new:
            content = self.contents[self.current[block]]
        if is_new or index < len(content):
            content = content[:index]
            self.current[block] = len(self.contents)
            self.contents.append(content)
        self._check_known(block, index)
        content += tokens

    def _check_known(self, block: Block, length: int) -> None:
        if block not in self.current or len(self.contents[self.current[block]]) < length:
            raise ValueError("the run read tokens that were computed before it, in a cache that it was given")

    def _origin(self, sample: _Sample) -> int:
        if sample.segment is not None:
            return self.last_tokens[id(sample.segment)]
        for block, length in reversed(sample.view):
            if length:
                return self.contents[self.current[block]][length - 1]
        raise AssertionError("a sampled token follows a token")
