"""Plan of the layers that keep a state in a forward pass: which rows they compute together, from and to which states.

A state belongs to the end of a block: the tokens up to there, in that order. A block that others follow leaves its
state to each of them, where rows fork. A row that is being decoded updates its own state in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
        sources, targets = (slots if slots is None else _of_rows(slots, rows) for slots in (self.sources, self.targets))
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
        return self if call.in_place else replace(self, calls=[replace(call, sources=call.targets, in_place=True)])


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
    known: dict[Block, int] = {}  # number of tokens of a block up to which its state is known
    ready: dict[Block, int] = {}  # level from which on a new state can be read
    busy: dict[Block, int] = {}  # level from which on a state can be overwritten, as all have read it
    growing: dict[Block, _Chunk] = {}
    chunks: list[_Chunk] = []
    offset = 0
    for segment in (one for segments in passes for one in segments):
        block = segment.view[-1]
        count = segment.num_tokens
        held = lengths.get(block, block.length)
        start = held if segment.write else held - count
        before = (one for one in reversed(segment.view[:-1]) if lengths.get(one, one.length))
        source = block if start else next(before, None)
        if source is not None and known.get(source, source.state_at) != (start or lengths.get(source, source.length)):
            raise MissingStateError(f"{source!r} has no state from which {count} tokens could continue at {start}")
        is_kept = segment.write or segment.keeps_state
        step = 1 if arena.stepwise and source is not None and is_kept else count
        for first in range(offset, offset + count, step):
            chunk = growing.get(block)
            if chunk is None or source is not block or not is_kept or arena.stepwise:
                level = 0 if source is None else ready.get(source, 0)
                chunk = _Chunk(block, source, is_kept, max(level, busy.get(block, 0)) if is_kept else level)
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
            lengths[block] = known[block] = start + count
    new = list(dict.fromkeys(chunk.block for chunk in chunks if chunk.is_kept and chunk.block.state < 0))
    for block, slot in zip(new, arena.allocate(len(new)), strict=True):
        block.state = slot
    arena.grow()
    groups: dict[tuple[int, int, bool, bool], list[_Chunk]] = {}
    for chunk in chunks:
        total = sum(count for _, count in chunk.ranges)
        groups.setdefault((chunk.level, total, chunk.source is None, chunk.is_kept), []).append(chunk)
    calls = [_call(groups[key], offset, device) for key in sorted(groups)]
    return StatePlan(calls, list(lengths), offset)


def states_read(passes: Sequence[Sequence[Segment]]) -> set[Block]:
    """Return the blocks from whose present states consecutive passes continue."""
    found: set[Block] = set()
    lengths: dict[Block, int] = {}  # of blocks that the passes write
    for segment in (one for segments in passes for one in segments):
        view = [*parts_of(segment.view)]
        block = view[-1]
        held = lengths.get(block, block.length)
        if not (held if segment.write else held - segment.num_tokens):  # else it continues from its own state
            view.pop()
        while view and not lengths.get(view[-1], view[-1].length):
            view.pop()
        if view and view[-1] not in lengths:
            found.add(view[-1])
        if segment.write:
            lengths[block] = held + segment.num_tokens
    return found


def _call(chunks: Sequence[_Chunk], num_tokens: int, device: torch.device) -> StateCall:
    indices = np.concatenate([np.arange(first, first + count) for one in chunks for first, count in one.ranges])
    is_all = len(indices) == num_tokens and bool((np.diff(indices) == 1).all())
    source_slots = [one.source.state for one in chunks if one.source is not None]
    target_slots = [one.block.state for one in chunks if one.is_kept]
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
