"""BlockCache: the face that models see. A `transformers.Cache` whose past is blocks, shared between rows.

Under the block attention implementation `update` stores the packed new tokens and hands them back; attention reads
the blocks in place. Under a stock implementation (`eager`, `sdpa`, ...) `update` returns each row's dense, re-rotated
keys and values: slow, correct, and the oracle of the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_parallel.cache.arena import Arena, LayerStorage
from hf_parallel.cache.layout import Block, ForwardPass, RunLayout, Segment, View, plan_pass, view_length
from hf_parallel.kernels import AttentionPlan, RotarySpec, rotate


class BlockCache(Cache):
    """Keys and values in blocks, each stored once, however many rows see it.

    Parameters
    ----------
    rotary : mapping of int to RotarySpec or None, optional
        Per layer index how it rotates (None: not at all). Needed only where blocks move or are seen at positions
        other than those that they were written for.
    device : torch.device, optional
        Where position ids are made; the storage follows the model's own tensors.
    """

    def __init__(
        self, rotary: Mapping[int, RotarySpec | None] | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__(layers=[])
        self.arena = Arena()
        self.rotary = dict(rotary) if rotary is not None else None
        self.device = torch.device(device or "cpu")
        self.blocks: set[Block] = set()
        self.rows: list[View] = []
        self.block_attention = False
        self._pass: ForwardPass | None = None
        self._last: ForwardPass | None = None  # the decode step before, from which the next one follows
        self._undo: list[tuple[Block, int]] = []
        self._updated: set[int] = set()  # layers that a pass under stock attention has been through

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: not the passes, whose plans have buffers of the kernels."""
        return self.__dict__ | {"_pass": None, "_last": None}

    # Blocks

    def new_block(self, capacity: int = 0, base: int = 0) -> Block:
        """Make an empty block with room for `capacity` tokens (it grows when more come)."""
        return self.new_blocks(1, capacity, base)[0]

    def new_blocks(self, count: int, capacity: int = 0, base: int = 0) -> list[Block]:
        """Make empty blocks that lie evenly spaced in memory, so that attention may read them in one call."""
        blocks = [Block(extent, base) for extent in self.arena.allocate(capacity, count)]
        self.blocks.update(blocks)
        return blocks

    def free(self, block: Block) -> None:
        """Forget a block and give its memory back."""
        self._known(block)
        self._last = None
        self.blocks.remove(block)
        self.arena.release(block.extent)

    def truncate(self, block: Block, length: int) -> None:
        """Forget the tokens of a block from index `length` on."""
        self._known(block)
        if not 0 <= length <= block.length:
            raise ValueError(f"length must be between 0 and the block's {block.length}, got {length}")
        block.length = length

    def split(self, block: Block, at: int) -> Block:
        """Cut a block in two without copying: it keeps `at` tokens, the returned block has the others."""
        self._known(block)
        if not 0 < at < block.length:
            raise ValueError(f"at must lie inside the block's {block.length} tokens, got {at}")
        tail = Block(block.extent, block.base + at, block.first + at, block.length - at)
        block.extent.owners += 1
        block.length = at
        self.blocks.add(tail)
        return tail

    def fork(self, block: Block, room: int = 0) -> Block:
        """Copy a block's tokens into a new block with room for `room` more."""
        self._known(block)
        copy = self.new_block(block.length + room, block.base)
        try:
            self.arena.copy(block.extent, block.first, copy.extent, 0, block.length)
        except BaseException:
            self.free(copy)
            raise
        copy.length = block.length
        return copy

    def move(self, source: Block, target: Block) -> None:
        """Move all tokens of `source` to the end of `target`, keys turned to their new positions.

        Only what moves is copied. `source` is empty afterwards.
        """
        self._known(source)
        self._known(target)
        if source is target:
            raise ValueError("a block cannot be moved into itself")
        delta = target.base + target.length - source.base
        if delta and self.rotary is None:
            raise ValueError("moving a block to other positions needs the rotary embedding of the model's layers")
        self.reserve([(target, target.length + source.length)])
        self.arena.copy(
            source.extent,
            source.first,
            target.extent,
            target.first + target.length,
            source.length,
            delta,
            self.rotary,
        )
        target.length += source.length
        source.length = 0

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """Make room for `length` tokens in each `(block, length)`.

        A block that must grow moves to an extent of at least twice its size, so that a token is copied a bounded
        number of times; those that outgrow equal extents stay evenly spaced.
        """
        outgrown: dict[int, list[tuple[Block, int]]] = {}
        for block, length in wanted:
            if block.first + length > block.extent.capacity or (block.extent.owners > 1 and length > block.length):
                outgrown.setdefault(block.extent.capacity, []).append((block, length))
        for capacity, growing in outgrown.items():
            size = max(2 * capacity, *(length for _, length in growing), 1)
            runs = [(block.extent, block.first, block.length) for block, _ in growing]
            for (block, _), extent in zip(growing, self.arena.rehouse(runs, size), strict=True):
                block.extent, block.first = extent, 0

    def _known(self, block: Block) -> None:
        if block not in self.blocks:
            raise ValueError(f"{block!r} is not (or no longer) a block of this cache")

    # Forward passes

    def prepare(self, segments: Sequence[Segment]) -> ForwardPass:
        """Make room for the new tokens of a forward pass and lay it out.

        Parameters
        ----------
        segments : sequence of Segment
            What each row brings, in the order in which the tokens are packed.

        Returns
        -------
        ForwardPass
            With the position ids to give to the model.

        Raises
        ------
        ValueError
            If a segment is empty, asks for tokens or blocks that are not there, or writes where another does; if it
            sees a block at another position than the block's own, and the cache does not know how layers rotate.
        """
        if self._last is not None and self._last.leads_to(segments):
            self._count([(segment.view[-1], 1) for segment in segments])
            return self._begin(self._last.next_step())
        grown = self._check([segments])
        self._make_room(grown)
        self._count(list(grown.items()))
        return self._begin(plan_pass(segments, self.device))

    def prepare_run(self, passes: Sequence[Sequence[Segment]]) -> ForwardPass:
        """Lay out passes whose tokens are all known as one forward pass, in which each query sees what its own had.

        They follow each other in time: a query sees the blocks as long as they were then, at the positions of then,
        whatever later passes add. So decode steps that are known from before (replayed, restored from their tokens, or
        trained on) cost one forward pass, and give the logits that they gave one by one.

        Parameters
        ----------
        passes : sequence of sequence of Segment
            At least one; each is what `prepare` would be given if those before it had been computed, its views as they
            were then. Blocks that they see must not be moved, split or cut in between.

        Returns
        -------
        ForwardPass
            All segments in packed order, pass by pass. Only block attention can compute it.

        Raises
        ------
        ValueError
            As `prepare`, or if there is no pass.
        """
        if not passes:
            raise ValueError("a run needs at least one pass, got none")
        grown = self._check(passes)
        self._make_room(grown)
        self._undo = [(block, block.length) for block in grown]
        layout = RunLayout()
        for segments in passes:
            for segment in segments:
                segment.view[-1].length += segment.num_tokens if segment.write else 0
            layout.add(segments)
        return self._begin(layout.forward_pass(self.device))

    def _check(self, passes: Sequence[Sequence[Segment]]) -> Counter[Block]:
        """Check the segments of passes; returns how many tokens they bring to each block."""
        grown: Counter[Block] = Counter()
        for segments in passes:
            written: set[Block] = set()
            asked: set[Block] = set()
            for segment in segments:
                self._check_segment(segment, grown)
                target = segment.view[-1]
                if target in written or (segment.write and target in asked):
                    reason = "two segments of a forward pass write to one block, or one asks what the other writes"
                    raise ValueError(reason)
                (written if segment.write else asked).add(target)
                if segment.write:
                    grown[target] += segment.num_tokens
        return grown

    def _check_segment(self, segment: Segment, grown: Counter[Block]) -> None:
        if not segment.view or segment.num_tokens < 1:
            raise ValueError(f"a segment needs a view and at least one new token, got {segment!r}")
        for block in segment.view:
            self._known(block)
        target = segment.view[-1]
        if not segment.write and segment.num_tokens > target.length + grown[target]:
            raise ValueError(f"a segment cannot ask more tokens again than its block holds, got {segment!r}")

    def _make_room(self, grown: Mapping[Block, int]) -> None:
        """Make room for so many new tokens in each block."""
        self.reserve([(block, block.length + n) for block, n in grown.items()])
        self.arena.grow()

    def _begin(self, forward: ForwardPass) -> ForwardPass:
        """Take a pass as the one that is under way."""
        if self.rotary is None and forward.plan.rotates:
            self.rollback()
            raise ValueError("seeing a block at another position than its own needs the rotary embedding of the layers")
        self._pass, self._updated = forward, set()
        return forward

    def _count(self, writing: Sequence[tuple[Block, int]]) -> None:
        """Count new tokens in their blocks, so that it can be taken back."""
        self._undo = [(block, block.length) for block, _ in writing]
        for block, n in writing:
            block.length += n

    def rollback(self) -> None:
        """Take back the lengths of the last prepared pass, if it did not come to its end."""
        for block, length in self._undo:
            block.length = length
        self._undo, self._pass = [], None

    @property
    def plan(self) -> AttentionPlan:
        """Plan of the pass that is under way."""
        if self._pass is None:
            raise RuntimeError("no forward pass is prepared: was the model called from a processor or a streamer?")
        return self._pass.plan

    def commit(self) -> None:
        """Say that the last prepared pass came to its end."""
        if self._pass is not None:
            self._last = self._pass if self._pass.is_decode_step else None
        self._undo, self._pass = [], None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values.

        Parameters
        ----------
        key_states, value_states : [1, kv_heads, T, head_dim], or [rows, kv_heads, n, head_dim] under stock attention
            New tokens in packed order, rotated to the pass's position ids.
        layer_idx : int
            Index of the layer.

        Returns
        -------
        (keys, values)
            Under block attention what was given; under a stock implementation `[rows, kv_heads, L, head_dim]`: each
            row's whole view, left-padded with zeros to the longest. Under autocast in its dtype, as attention has it.
        """
        device = key_states.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if self.block_attention:
            self.arena.write(layer_idx, key_states[0], value_states[0], self.plan)
            return key_states, value_states
        if self._pass is None or layer_idx in self._updated:  # a new pass, which the caller did not prepare
            self._prepare_rows(key_states)
        assert self._pass is not None
        if self._pass.num_passes > 1:
            raise ValueError("a run of passes sees blocks as long as they were then, which needs block attention")
        self._updated.add(layer_idx)
        packed = [states.transpose(0, 1).flatten(1, 2) for states in (key_states, value_states)]
        self.arena.write(layer_idx, packed[0], packed[1], self.plan)
        return self._dense(layer_idx, self._pass)

    def storage(self, layer_idx: int) -> LayerStorage:
        """A layer's keys and values, for attention to read in place."""
        return self.arena.layers[layer_idx]

    # Stock attention

    def _prepare_rows(self, key_states: torch.Tensor) -> None:
        """Lay out a pass that the caller did not prepare: each of `rows` brings as many tokens as the batch has."""
        batch, _, length, _ = key_states.shape
        if not self.rows:
            self.rows = [[block] for block in self.new_blocks(batch, length)]
        if len(self.rows) != batch:
            raise ValueError(f"this cache has {len(self.rows)} rows, the batch has {batch}")
        held = self.get_seq_length()
        if any((view_length(view), view[-1].base + view[-1].length) != (held, held) for view in self.rows):
            raise ValueError(
                "rows of unequal lengths, or that see blocks at other positions than their own, need prepare(), its "
                "position_ids and attention_mask()"
            )
        self.prepare([Segment(view, length) for view in self.rows])

    def _dense(self, layer_idx: int, forward: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Spell out every row's view: blocks in order, keys turned to where the row's queries expect them."""
        layer = self.arena.layers[layer_idx]
        spec = None if self.rotary is None else self.rotary.get(layer_idx)
        longest = max(view_length(segment.view) for segment in forward.segments)
        keys = layer.keys.new_zeros(len(forward.segments), layer.num_kv_heads, longest, layer.keys.shape[-1])
        values = layer.values.new_zeros(len(forward.segments), layer.num_kv_heads, longest, layer.values.shape[-1])
        for row, segment in enumerate(forward.segments):
            start = longest - view_length(segment.view)
            place = 0
            shift = view_length(segment.view[:-1]) - segment.view[-1].base
            for block in segment.view:
                at = layer.rows(block.extent, block.first, block.first + block.length)
                k = layer.keys[at]
                delta = (place - block.base) - shift
                if delta and spec is not None and block.length:
                    k = rotate(k, *Arena._turn(spec, delta, k), spec)
                keys[row, :, start : start + block.length] = k
                values[row, :, start : start + block.length] = layer.values[at]
                start, place = start + block.length, place + block.length
        return keys, values

    def attention_mask(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Two-dimensional mask `int64 [rows, longest]` of the dense rows, for a stock forward pass after `prepare`."""
        lengths = torch.tensor([view_length(segment.view) for segment in segments], device=self.device)
        longest = int(lengths.max())
        return (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()

    # What transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the longest row's view, in tokens."""
        return max((view_length(view) for view in self.rows), default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Place of the first new token in the dense rows."""
        if self._pass is None or self._updated:
            return self.get_seq_length(layer_idx)
        longest = max(self._pass.segments, key=lambda segment: view_length(segment.view))
        return view_length(longest.view) - longest.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the dense keys that stock attention will see."""
        return self.get_query_offset(layer_idx) + query_length, 0

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """-1: a block cache has no maximum length."""
        return -1

    get_max_length = get_max_cache_shape

    @property
    def batch_size(self) -> int:
        """Number of rows under stock attention; -1 before there are any."""
        return len(self.rows) or -1

    max_batch_size = batch_size

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row `i` go on from where row `beam_idx[i]` is: int64 `[rows]`, as beam search asks."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, int64 `[rows]`."""
        self._select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` rows in the place of each."""
        self._select_rows([row for row in range(len(self.rows)) for _ in range(repeats)])

    def _select_rows(self, chosen: Sequence[int]) -> None:
        """Make the rows those that are `chosen`. What a row writes to is its own, so twins get a copy of that block."""
        self._check_rows()
        views = [self.rows[row] for row in chosen]
        seen = {block for view in views for block in view}
        for view in self.rows:
            if view[-1] not in seen:
                self.free(view[-1])
        for place, view in enumerate(views):
            if chosen[place] in chosen[:place]:
                views[place] = [*view[:-1], self.fork(view[-1], view[-1].room)]
        self.rows = views

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; a positive number is the length to cut rows to."""
        self._check_rows()
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
            raise ValueError("this cache has blocks but no rows; only those of stock attention can be selected or cut")

    def reset(self) -> None:
        """Forget everything and give all memory back; the cache may then serve another model."""
        self.arena = Arena()
        self.blocks, self.rows = set(), []
        self._pass = self._last = None
        self._undo, self._updated = [], set()

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held: unique tokens, once."""
        return sum(block.length for block in self.blocks) * self.arena.bytes_per_token

    def __len__(self) -> int:
        return len(self.arena.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.blocks)} blocks, {sum(b.length for b in self.blocks)} tokens)"
