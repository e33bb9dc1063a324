"""Trace: which tokens a run computed, in which blocks, and which blocks each of them saw.

A trace holds integers only and does not depend on the storage of the keys. `Trace.compile` follows tokens from block to
block, so that the whole run can be computed again in one pass, with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from hf_parallel.cache.batch import ForwardPass, Segment, View
from hf_parallel.cache.pool import Block


@dataclass(eq=False)
class _Passes:
    """One forward pass, or consecutive decode steps of the same rows."""

    given: list[Sequence[Segment]]  # segments of each step, as the mode created them
    num_segments: list[int]  # of each of the passes that were computed as one
    segments: Sequence[Segment]  # with their views at the time of the pass
    states: dict[Block, tuple[int, int]]  # length and base of each block after the first step
    ids: list[torch.Tensor]  # int64 `[tokens]`, of each step


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
class CompiledTrace:
    """A run as integers. Lists of arrays are ragged; tokens are numbered in the order in which they were computed."""

    input_ids: np.ndarray  # int64 [T]
    position_ids: np.ndarray  # int64 [T], to which the model rotated them
    contents: list[list[int]]  # of each block: the numbers of its tokens
    segments: list[tuple[int, int, int, list[tuple[int, int, int]]]]
    """First token, number of tokens, position of the first in its view, and the blocks of the view: number, start in
    the view, and length."""
    samples: list[tuple[int, int, int]]  # row, number of the token whose logits were sampled, sampled token


@dataclass(eq=False)
class Trace:
    """Forward passes and copies of blocks in order, and the tokens that were sampled."""

    _events: list[_Passes | BlockCopy] = field(default_factory=list)
    _samples: list[_Sample] = field(default_factory=list)

    def add_pass(self, passes: Sequence[Sequence[Segment]], forward: ForwardPass, ids: torch.Tensor) -> None:
        """Record a forward pass over packed tokens `ids`, int64 `[T]`, computed for the given consecutive passes."""
        given = [segment for segments in passes for segment in segments]
        last = next((event for event in reversed(self._events) if isinstance(event, _Passes)), None)
        if last is not None and last.segments is forward.segments:  # the next decode step
            last.given.append(given)
            last.ids.append(ids)
            return
        states = {block: (block.length, block.base) for segment in forward.segments for block in segment.view}
        self._events.append(_Passes([given], list(map(len, passes)), forward.segments, states, [ids]))

    def add_copy(self, source: Block, start: int, stop: int, target: Block, at: int) -> None:
        """Record that tokens of a block were copied, or moved, to another block."""
        if stop > start:
            self._events.append(BlockCopy(source, start, stop, target, at))

    def add_sample(self, row: int, token: int, segment: Segment | None, view: View) -> None:
        """Record a token that a row sampled after the last token of `segment`, or of `view` if it has none yet."""
        held = () if segment is not None else tuple((block, block.length) for block in view)
        self._samples.append(_Sample(row, token, segment, held))

    @property
    def state(self) -> tuple[int, int, int]:
        """Argument of `restore`: numbers of events, of steps in the last event, and of samples."""
        last = self._events[-1] if self._events else None
        return len(self._events), len(last.ids) if isinstance(last, _Passes) else 0, len(self._samples)

    def restore(self, state: tuple[int, int, int]) -> None:
        """Forget what was recorded since `state`."""
        events, steps, samples = state
        del self._events[events:], self._samples[samples:]
        last = self._events[-1] if self._events else None
        if isinstance(last, _Passes):
            del last.ids[steps:], last.given[steps:]

    def compile(self) -> CompiledTrace:
        """Return the run as integers. Raises `ValueError` if it read tokens that an earlier call had computed."""
        return _Compiler().compile(self._events, self._samples)


class _Compiler:
    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.positions: list[int] = []
        self.contents: list[list[int]] = []
        self.current: dict[Block, int] = {}  # number of the content that a block has now
        self.segments: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
        self.last_tokens: dict[int, int] = {}  # by id of a given segment

    def compile(self, events: Sequence[_Passes | BlockCopy], samples: Sequence[_Sample]) -> CompiledTrace:
        for event in events:
            if isinstance(event, BlockCopy):
                source = self.contents[self.current[event.source]]
                self._write(event.target, event.at, source[event.start : event.stop])
            else:
                self._add_passes(event)
        taken = [(sample.row, self._origin(sample), sample.token) for sample in samples]
        ids = torch.cat(self.ids).cpu().numpy() if self.ids else np.empty(0, np.int64)
        return CompiledTrace(ids, np.array(self.positions, np.int64), self.contents, self.segments, taken)

    def _add_passes(self, event: _Passes) -> None:
        targets = [segment.view[-1] for segment in event.segments]
        lengths = {block: length for block, (length, _) in event.states.items()}
        for segment, target in zip(event.segments, targets, strict=True):
            lengths[target] -= segment.num_tokens if segment.write else 0
        for given, ids in zip(event.given, event.ids, strict=True):
            self.ids.append(ids)
            begin = 0
            for end in accumulate(event.num_segments):
                self._add_pass(event, given[begin:end], event.segments[begin:end], lengths)
                begin = end

    def _add_pass(
        self, event: _Passes, given: Sequence[Segment], segments: Sequence[Segment], lengths: dict[Block, int]
    ) -> None:
        firsts = []
        for segment, original in zip(segments, given, strict=True):
            target, n, first = segment.view[-1], segment.num_tokens, len(self.positions)
            lengths[target] += n if segment.write else 0
            index = lengths[target] - n
            self.positions += range(event.states[target][1] + index, event.states[target][1] + index + n)
            if segment.write:
                self._write(target, index, range(first, first + n))
            firsts.append(first)
            self.last_tokens[id(original)] = first + n - 1
        for segment, first in zip(segments, firsts, strict=True):
            start, view = 0, []
            for block in segment.view:
                if lengths[block]:
                    self._check_known(block, lengths[block])
                    view.append((self.current[block], start, lengths[block]))
                start += lengths[block]
            self.segments.append((first, segment.num_tokens, start - segment.num_tokens, view))

    def _write(self, block: Block, index: int, tokens: Sequence[int]) -> None:
        """Write tokens to a block from an index on. Tokens that they replace stay visible to earlier queries."""
        content = self.contents[self.current[block]] if block in self.current else None
        if content is None or index < len(content):
            content = [] if content is None else content[:index]
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
        block, length = next((block, length) for block, length in reversed(sample.view) if length)
        return self.contents[self.current[block]][length - 1]
