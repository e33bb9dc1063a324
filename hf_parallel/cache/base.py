"""`BlockCache`: blocks of keys and values as a `transformers.Cache` (docs/block_attention.md).

Under block attention, `update` stores the packed new tokens and returns them; attention reads the blocks in place.
Under a stock attention implementation (`eager`, `sdpa`, ...), `update` returns each row's keys and values densely,
re-rotated and padded: slow and correct, the oracle of the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache

from hf_parallel.cache.arena import Arena
from hf_parallel.cache.layout import Block, ForwardPass, Segment, View, plan_passes, view_length
from hf_parallel.cache.trace import Trace
from hf_parallel.kernels import AttentionPlan, LayerStorage, RotarySpec, rotate_by


class BlockCache(Cache):
    """Keys and values in blocks of one arena, each stored once, however many rows see it.

    `layers` is empty, as blocks hold the keys and values of all layers; `len()` is the number of the model's layers.

    Parameters
    ----------
    rotary : mapping of int to RotarySpec or None, optional
        Rotary embedding by layer index (None: the layer has none). Needed only if blocks are moved or seen at
        positions other than those that they were written for.
    device : torch.device, optional
        Device of position ids; the storage is on the device of the model's keys. Default: the CPU, and in the modes
        the device of the model.
    """

    in_place = False
    """Whether attention reads the blocks in place. `models.attention.block_attention_enabled` sets it."""

    def __init__(
        self, rotary: Mapping[int, RotarySpec | None] | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__(layers=[])
        self.rotary = dict(rotary) if rotary is not None else None
        self.trace: Trace | None = None  # of the running call
        self.device, self._has_device = torch.device(device or "cpu"), device is not None
        self.reset()

    def reset(self) -> None:
        """Delete everything and release all memory; the cache can then be used with another model."""
        self.arena = Arena()
        self.blocks: set[Block] = set()
        self.rows: list[View] = []  # views of the batch under stock attention; empty under block attention
        self._pass: ForwardPass | None = None
        self._last: ForwardPass | None = None  # last committed decode step, from which the next one is derived
        self._undo: list[tuple[Block, int]] = []
        self._freed_later: list[Block] | None = None
        self._updated: set[int] = set()  # layers that the prepared pass has updated, under stock attention

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pass": None, "_last": None, "trace": None}  # plans of passes hold kernel buffers

    # Blocks

    def new_block(self, capacity: int = 0, base: int = 0) -> Block:
        """Allocate an empty block for `capacity` tokens; it grows when more are appended."""
        return self.new_blocks(1, capacity, base)[0]

    def new_blocks(self, count: int, capacity: int = 0, base: int = 0) -> list[Block]:
        """Allocate empty blocks evenly spaced in memory, so that attention can read them in one call."""
        blocks = [Block(extent, base) for extent in self.arena.allocate(capacity, count)]
        self.blocks.update(blocks)
        return blocks

    def free(self, block: Block) -> None:
        """Delete a block and release its memory; between `defer_frees` and `free_deferred`, after `free_deferred`."""
        self.check_owned(block)
        if self._freed_later is not None:
            self._freed_later.append(block)
            return
        self._last = None
        self.blocks.remove(block)
        self.arena.release(block.extent)

    def defer_frees(self) -> None:
        """Keep blocks that are freed from now on until `free_deferred`, so that a change can be undone."""
        self._freed_later = []

    def free_deferred(self, keep: bool = False) -> None:
        """End `defer_frees`. `keep`: the change was undone, and its blocks remain."""
        freed, self._freed_later = self._freed_later or [], None
        for block in () if keep else freed:
            self.free(block)

    def truncate(self, block: Block, length: int) -> None:
        """Remove a block's tokens from index `length` on; raises `ValueError` unless `0 <= length <= block.length`."""
        self.check_owned(block)
        if not 0 <= length <= block.length:
            raise ValueError(f"length must be between 0 and the block's {block.length}, got {length}")
        block.length = length

    def split(self, block: Block, at: int) -> Block:
        """Split a block in two without copying: it keeps `at` tokens, the returned block holds the others."""
        self.check_owned(block)
        if not 0 < at < block.length:
            raise ValueError(f"at must lie inside the block's {block.length} tokens, got {at}")
        tail = Block(block.extent, block.base + at, block.first + at, block.length - at)
        block.extent.owners += 1
        block.length = at
        self.blocks.add(tail)
        self._trace_copy(block, at, at + tail.length, tail, 0)
        return tail

    def fork(self, block: Block, extra_capacity: int = 0) -> Block:
        """Copy a block's tokens into a new block with capacity for `extra_capacity` more."""
        return self._copy_of(block, [(0, block.length)], extra_capacity)

    def _copy_of(self, block: Block, kept: Sequence[tuple[int, int]], extra_capacity: int = 0) -> Block:
        """Copy the tokens `start <= j < stop` of each `(start, stop)` into a new block, rotated to their positions."""
        self.check_owned(block)
        length = sum(stop - start for start, stop in kept)
        copy = self.new_block(length + extra_capacity, block.base)
        copy.gap = block.gap
        try:
            self.reserve([(copy, length)])  # blocks of a shared storage begin without memory
            for start, stop in kept:
                source = block.extent.range(block.first + start, stop - start)
                target = copy.extent.range(copy.length, stop - start)
                self.arena.copy(source, target, copy.length - start, self.rotary)
                self._trace_copy(block, start, stop, copy, copy.length)
                copy.length += stop - start
        except BaseException:
            self.free(copy)
            raise
        return copy

    def move(self, source: Block, target: Block) -> None:
        """Move all tokens of `source` to the end of `target`, with keys rotated to their new positions.

        Copies only these tokens; `source` is empty afterwards. Raises `ValueError` if the blocks are the same, or if
        positions change and the rotary embedding is unknown.
        """
        self.check_owned(source)
        self.check_owned(target)
        if source is target:
            raise ValueError("a block cannot be moved into itself")
        delta = target.base + target.length - source.base
        if delta and self.rotary is None:
            raise ValueError("moving a block to other positions needs the rotary embedding of the model's layers")
        self.reserve([(target, target.length + source.length)])
        end = target.extent.range(target.first + target.length, source.length)
        self.arena.copy(source.tokens, end, delta, self.rotary)
        self._trace_copy(source, 0, source.length, target, target.length)
        target.length += source.length
        source.length = 0

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """Ensure capacity for `length` tokens in each `(block, length)`.

        A block that must grow moves to an extent of at least twice the capacity, so that growth copies each token
        O(1) times (amortized). Blocks of equal capacity that grow together stay evenly spaced.
        """
        outgrown: dict[int, list[tuple[Block, int]]] = {}
        for block, length in wanted:
            if block.first + length > block.extent.capacity or (block.extent.owners > 1 and length > block.length):
                outgrown.setdefault(block.extent.capacity, []).append((block, length))
        for capacity, growing in outgrown.items():
            size = max(2 * capacity, *(length for _, length in growing), 1)
            runs = [(block.extent, block.first, block.length) for block, _ in growing]
            for (block, _), extent in zip(growing, self.arena.relocate(runs, size), strict=True):
                block.extent, block.first = extent, 0

    def storage(self, layer_idx: int) -> LayerStorage:
        """Return a layer's keys and values, which attention reads in place."""
        return self.arena.layers[layer_idx]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all unique tokens."""
        return sum(block.length for block in self.blocks) * self.arena.bytes_per_token

    def _trace_copy(self, source: Block, start: int, stop: int, target: Block, at: int) -> None:
        if self.trace is not None:
            self.trace.add_copy(source, start, stop, target, at)

    def check_owned(self, block: Block) -> None:
        """Raise `ValueError` unless a block is one of this cache."""
        if block not in self.blocks:
            raise ValueError(f"{block!r} is not (or no longer) a block of this cache")

    # Forward passes

    def prepare(self, segments: Sequence[Segment]) -> ForwardPass:
        """Plan a forward pass of segments in packed order, and allocate memory for its new tokens.

        Raises `ValueError` if a segment is empty, reads tokens or blocks that do not exist, or writes to the block of
        another segment; or if a block is seen at a position other than its own and the rotary embedding is unknown.
        """
        return self.prepare_run([segments])

    def prepare_run(self, passes: Sequence[Sequence[Segment]]) -> ForwardPass:
        """Plan consecutive passes, whose tokens are all known, as one forward pass. Requires block attention.

        A query sees each block with the length and position that it has in the query's own pass. So the logits equal
        those of separate passes, and decode steps that are known in advance (replayed, restored from their tokens, or
        trained on) cost one forward pass. Each element of `passes` is the argument that `prepare` would receive after
        the preceding passes; blocks must not be moved, split or truncated between passes.
        """
        if not passes:
            raise ValueError("passes must contain at least one pass, got none")
        if len(passes) == 1 and self._last is not None and self._last.leads_to(passes[0]):
            self._undo = [(segment.view[-1], segment.view[-1].length) for segment in passes[0]]
            for segment in passes[0]:
                segment.view[-1].length += 1
            return self._begin(self._last.next_step())
        new_tokens = self._check(passes)
        self.reserve([(block, block.length + n) for block, n in new_tokens.items()])
        self.arena.grow()
        self._undo = [(block, block.length) for block in new_tokens]
        return self._begin(plan_passes(passes, self.device))

    @property
    def plan(self) -> AttentionPlan:
        """Attention plan of the prepared pass."""
        if self._pass is None:
            raise RuntimeError("no forward pass is prepared: was the model called from a processor or a streamer?")
        return self._pass.plan

    def commit(self) -> None:
        """Confirm that the prepared pass has been computed."""
        if self._pass is not None:
            self._last = self._pass if self._pass.is_decode_step else None
        self._undo, self._pass = [], None

    def rollback(self) -> None:
        """Restore the block lengths from before the prepared pass, if it was not committed."""
        for block, length in self._undo:
            block.length = length
        self._undo, self._pass = [], None

    def take_back(self) -> ForwardPass:
        """Remove the tokens of the last pass, a committed decode step, and return it; see `put_back`."""
        step = self._last
        if step is None:
            raise RuntimeError("the last pass was not a decode step, or a block was freed after it")
        for segment in step.segments:
            self.truncate(segment.view[-1], segment.view[-1].length - 1)
        return step

    def put_back(self, step: ForwardPass, rows: Sequence[int]) -> None:
        """Append the tokens of some segments of a pass again, to whose blocks nothing was written since `take_back`."""
        for row in rows:
            step.segments[row].view[-1].length += 1

    def _check(self, passes: Sequence[Sequence[Segment]]) -> Counter[Block]:
        """Validate the segments of consecutive passes; returns the number of new tokens per block."""
        new_tokens: Counter[Block] = Counter()
        for segments in passes:
            written: set[Block] = set()
            read: set[Block] = set()
            for segment in segments:
                if not segment.view or segment.num_tokens < 1:
                    raise ValueError(f"a segment needs a view and at least one new token, got {segment!r}")
                for block in segment.view:
                    self.check_owned(block)
                target = segment.view[-1]
                if not segment.write and segment.num_tokens > target.length + new_tokens[target]:
                    raise ValueError(f"a segment cannot reread more tokens than its block holds, got {segment!r}")
                if target in written or (segment.write and target in read):
                    raise ValueError("two segments of a pass write to one block, or one rereads what the other writes")
                (written if segment.write else read).add(target)
                if segment.write:
                    new_tokens[target] += segment.num_tokens
        return new_tokens

    def _begin(self, forward: ForwardPass) -> ForwardPass:
        if self.rotary is None and forward.plan.rotates:
            self.rollback()
            raise ValueError("a block seen at another position than its own needs the rotary embedding: pass rotary=")
        self._pass, self._updated = forward, set()
        return forward

    # transformers.Cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, rotated to the pass's position ids.

        They are `[1, kv_heads, T, head_dim]`, or under stock attention `[rows, kv_heads, n, head_dim]`. Returns them
        unchanged, or under stock attention each row's whole view, left-padded with zeros to the longest:
        `[rows, kv_heads, L, head_dim]`. Under autocast, keys and values get its dtype. In a compiled layer, the
        attention operation stores them.
        """
        device = key_states.device.type
        if torch.is_autocast_enabled(device):  # also while a layer is traced: its compiled code runs without
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if torch.compiler.is_compiling():
            return key_states, value_states
        if self.in_place:
            self.arena.write(layer_idx, key_states[0], value_states[0], self.plan)
            return key_states, value_states
        if self._pass is None or layer_idx in self._updated:  # the caller did not prepare this pass
            self._prepare_rows(key_states)
        assert self._pass is not None
        if self._pass.num_passes > 1:
            raise ValueError("consecutive passes prepared as one need block attention")
        self._updated.add(layer_idx)
        packed = [states.transpose(0, 1).flatten(1, 2) for states in (key_states, value_states)]
        self.arena.write(layer_idx, packed[0], packed[1], self.plan)
        return self._dense(layer_idx, self._pass)

    def _prepare_rows(self, key_states: torch.Tensor) -> None:
        """Prepare a pass that appends the new tokens of each row of the batch to the same row of `rows`."""
        batch, _, length, _ = key_states.shape
        if not self.rows:
            if self.blocks:
                raise ValueError(
                    f"a plain forward pass cannot continue the rows of this {type(self).__name__}: pass it to generate "
                    "with the mode that filled it"
                )
            self.rows = [[block] for block in self.new_blocks(batch, length)]
        if len(self.rows) != batch:
            raise ValueError(f"this cache has {len(self.rows)} rows, the batch has {batch}")
        held = self.get_seq_length()
        if any((view_length(view), view[-1].base + view[-1].length) != (held, held) for view in self.rows):
            raise ValueError(
                "rows of unequal lengths, or that see blocks at other positions than their own, need prepare(): pass "
                "its position_ids and the cache's attention_mask() to the model"
            )
        self.prepare([Segment(view, length) for view in self.rows])

    def _dense(self, layer_idx: int, forward: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Concatenate every row's blocks, with keys rotated to the positions that the row's queries expect."""
        layer = self.storage(layer_idx)
        spec = None if self.rotary is None else self.rotary.get(layer_idx)
        longest = max(view_length(segment.view) for segment in forward.segments)
        dense: list[list[torch.Tensor]] = [[], []]
        for segment in forward.segments:
            position, keys, values = 0, [], []
            shift = view_length(segment.view[:-1]) - segment.view[-1].base
            for block in segment.view:
                stored = layer.rows(block.tokens)
                delta = (position - block.base) - shift
                k = layer.keys[stored]
                keys.append(rotate_by(k, delta, spec) if delta and spec is not None else k)
                values.append(layer.values[stored])
                position += block.length
            for rows, parts in zip(dense, (keys, values), strict=True):
                rows.append(F.pad(torch.cat(parts, dim=1), (0, 0, longest - position, 0)))
        return torch.stack(dense[0]), torch.stack(dense[1])

    def attention_mask(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Return the mask `int64 [rows, longest]` of the dense rows, for a stock forward pass after `prepare`."""
        lengths = torch.tensor([view_length(segment.view) for segment in segments], device=self.device)
        longest = int(lengths.max())
        return (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest row's view in tokens."""
        return max((view_length(view) for view in self.rows), default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the index of the first new token in the dense rows; 0 under block attention, which has none."""
        if self.in_place:
            return 0
        if self._pass is None or self._updated:
            return self.get_seq_length(layer_idx)
        longest = max(self._pass.segments, key=lambda segment: view_length(segment.view))
        return view_length(longest.view) - longest.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the dense keys under stock attention."""
        return self.get_query_offset(layer_idx) + query_length, 0

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return -1: a block cache has no maximum length."""
        return -1

    get_max_length = get_max_cache_shape

    @property
    def batch_size(self) -> int:
        """Number of rows under stock attention; -1 if there are none yet."""
        return len(self.rows) or -1

    max_batch_size = batch_size

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select the rows `beam_idx`, int64 `[rows]`; repeated rows get a copy of the block that they append to."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, int64 `[rows]`."""
        self._select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._select_rows([row for row in range(len(self.rows)) for _ in range(repeats)])

    def _select_rows(self, chosen: Sequence[int]) -> None:
        self._check_rows()
        views = [self.rows[row] for row in chosen]
        seen = {block for view in views for block in view}
        for view in self.rows:
            if view[-1] not in seen:
                self.free(view[-1])
        for index, view in enumerate(views):
            if chosen[index] in chosen[:index]:
                views[index] = [*view[:-1], self.fork(view[-1], view[-1].free_slots)]
        self.rows = views

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row; a positive number is the new length of all rows."""
        self._check_rows()
        tokens_to_remove = int(tokens_to_remove)  # some versions of transformers pass a tensor
        lengths = [view_length(view) for view in self.rows]
        for view, length in zip(self.rows, lengths, strict=True):
            left = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
            for block in view:
                self.truncate(block, min(block.length, max(left, 0)))
                left -= block.length
            if not view[-1].length:
                view[-1].base = view_length(view)

    def _check_rows(self) -> None:
        if self.blocks and not self.rows:
            raise ValueError("this cache has blocks but no rows; only rows under stock attention can be changed")

    def __len__(self) -> int:
        return len(self.arena.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.blocks)} blocks, {sum(b.length for b in self.blocks)} tokens)"
