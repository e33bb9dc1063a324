"""Plan of the layers that keep a state in a forward pass: which rows they compute together, from and to which states.

A state belongs to the end of a block: the tokens up to there, in that order. A block that others follow leaves its
state to each of them, where rows fork. A row that is being decoded updates its own state in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from hf_parallel.cache.batch import Segment
from hf_parallel.cache.pool import Block, parts_of
from hf_parallel.cache.states import Slots, StateArena
from hf_parallel.kernels import to_device


class MissingStateError(LookupError):
    """Raised if a row continues where no state was kept: a defect of this package."""


@dataclass(frozen=True, eq=False)
class StateCall:
    """One call of each module that keeps a state, for rows with equally many new tokens."""

    tokens: torch.Tensor | None  # int64 [rows * length], their packed indices; None: all tokens of the pass
    num_rows: int
    sources: Slots | None  # from whose states the rows continue; None: they start
    targets: Slots | None  # where their new states are kept; None: nowhere
    in_place: bool = False  # whether sources and targets are the same

    def of_rows(self, rows: Sequence[int]) -> StateCall:
        """Return the call for some of the rows, and for no other token."""
        sources = None if self.sources is None else _of_rows(self.sources, rows)
        targets = None if self.targets is None else _of_rows(self.targets, rows)
        return StateCall(None, len(rows), sources, targets, self.in_place)


@dataclass(frozen=True, eq=False)
class StatePlan:
    """Calls of a pass in order, and the blocks whose states they write."""

    calls: Sequence[StateCall]
    blocks: Sequence[Block]
    num_tokens: int  # new tokens of the pass

    def next_step(self) -> StatePlan | None:
        """Return the plan of the next decode step, or None if it needs another one."""
        if len(self.calls) != 1 or any(block.state_at != block.length for block in self.blocks):
            return None
        (call,) = self.calls
        if call.in_place:
            return self
        next_call = replace(call, sources=call.targets, in_place=True)
        return replace(self, calls=[next_call])


@dataclass(eq=False)
class _Chunk:
    """New tokens of a block that a module computes at once."""

    block: Block
    source: Block | None
    is_kept: bool
    level: int  # calls of a lower level come before
    ranges: list[tuple[int, int]] = field(default_factory=list)  # first packed token, number of tokens


def plan_states(arena: StateArena, passes: Sequence[Sequence[Segment]], device: torch.device) -> StatePlan:
    """Plan the calls of consecutive passes, and allocate slots for the new states. Runs before `plan_passes`.

    A row starts from the state at the end of the last block before it, or continues from its own. Consecutive tokens of
    a block are computed in one call. Raises `MissingStateError` if a state was not kept.
    """
    lengths: dict[Block, int] = {}
    state_at: dict[Block, int] = {}  # number of tokens of a block up to which its state is known
    ready: dict[Block, int] = {}  # level from which on a new state can be read
    busy: dict[Block, int] = {}  # level from which on a state can be overwritten, as all have read it
    growing: dict[Block, _Chunk] = {}
    chunks: list[_Chunk] = []
    offset = 0
    for segment in chain.from_iterable(passes):
        block = segment.view[-1]
        count = segment.num_tokens
        length = lengths.get(block, block.length)
        start = length if segment.write else length - count
        source = block if start else None
        if source is None:
            filled = (other for other in reversed(segment.view[:-1]) if lengths.get(other, other.length))
            source = next(filled, None)
        if source is not None:
            needed_at = start or lengths.get(source, source.length)
            if state_at.get(source, source.state_at) != needed_at:
                raise MissingStateError(f"{source!r} has no state from which {count} tokens could continue at {start}")
        is_kept = segment.write or segment.keeps_state
        step = 1 if arena.stepwise and source is not None and is_kept else count
        for first in range(offset, offset + count, step):
            chunk = growing.get(block)
            if chunk is None or source is not block or not is_kept or arena.stepwise:
                level = 0 if source is None else ready.get(source, 0)
                if is_kept:
                    level = max(level, busy.get(block, 0))
                chunk = _Chunk(block, source, is_kept, level)
                chunks.append(chunk)
                if source is not None:
                    growing.pop(source, None)
                    busy[source] = max(busy.get(source, 0), chunk.level + 1)
            chunk.ranges.append((first, step))
            if is_kept:
                growing[block] = chunk
                ready[block] = chunk.level + 1
                source = block
        offset += count
        if is_kept:
            lengths[block] = start + count
            state_at[block] = start + count
    kept_chunks = [chunk for chunk in chunks if chunk.is_kept]
    without_slot = list(dict.fromkeys(chunk.block for chunk in kept_chunks if chunk.block.state < 0))
    slots = arena.allocate(len(without_slot))
    for block, slot in zip(without_slot, slots, strict=True):
        block.state = slot
    arena.grow()
    groups: dict[tuple[int, int, bool, bool], list[_Chunk]] = {}
    for chunk in chunks:
        total = sum(count for _, count in chunk.ranges)
        kind = (chunk.level, total, chunk.source is None, chunk.is_kept)
        groups.setdefault(kind, []).append(chunk)
    calls = [_call(groups[key], offset, device) for key in sorted(groups)]
    return StatePlan(calls, list(lengths), offset)


def states_read(passes: Sequence[Sequence[Segment]]) -> set[Block]:
    """Return the blocks from whose present states consecutive passes continue."""
    blocks: set[Block] = set()
    lengths: dict[Block, int] = {}  # of blocks that the passes write
    for segment in chain.from_iterable(passes):
        view = [*parts_of(segment.view)]
        block = view[-1]
        length = lengths.get(block, block.length)
        start = length if segment.write else length - segment.num_tokens
        if not start:  # else it continues from its own state
            view.pop()
        while view and not lengths.get(view[-1], view[-1].length):
            view.pop()
        if view and view[-1] not in lengths:
            blocks.add(view[-1])
        if segment.write:
            lengths[block] = length + segment.num_tokens
    return blocks


def _call(chunks: Sequence[_Chunk], num_tokens: int, device: torch.device) -> StateCall:
    parts = []
    source_slots = []
    target_slots = []
    for chunk in chunks:
        parts += [np.arange(first, first + count) for first, count in chunk.ranges]
        if chunk.source is not None:
            source_slots.append(chunk.source.state)
        if chunk.is_kept:
            target_slots.append(chunk.block.state)
    indices = np.concatenate(parts)
    is_all = len(indices) == num_tokens and bool((np.diff(indices) == 1).all())
    return StateCall(
        tokens=None if is_all else to_device(indices, device),
        num_rows=len(chunks),
        sources=_slots(source_slots, device) if source_slots else None,
        targets=_slots(target_slots, device) if target_slots else None,
        in_place=source_slots == target_slots,
    )


def _slots(numbers: Sequence[int], device: torch.device) -> Slots:
    first = numbers[0]
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return to_device(np.array(numbers, np.int64), device)


def _of_rows(slots: Slots, rows: Sequence[int]) -> Slots:
    if isinstance(slots, torch.Tensor):
        return slots[to_device(rows, slots.device)]
    return _slots([slots.start + row for row in rows], torch.device("cpu"))
