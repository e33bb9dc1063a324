"""`BlockPool`: blocks of keys and values, and the forward passes that append to them (DESIGN.md section 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_parallel.cache.arena import Arena
from hf_parallel.cache.layout import Block, ForwardPass, PassPlanner, Segment
from hf_parallel.kernels import AttentionPlan, RotarySpec
from hf_parallel.kernels.storage import LayerStorage


class BlockPool:
    """Blocks in one arena, each stored once, however many rows see it. See `BlockCache` for the parameters."""

    def __init__(
        self, rotary: Mapping[int, RotarySpec | None] | None = None, device: torch.device | str | None = None
    ) -> None:
        self.arena = Arena()
        self.rotary = dict(rotary) if rotary is not None else None
        self.device = torch.device(device or "cpu")
        self.blocks: set[Block] = set()
        self._pass: ForwardPass | None = None
        self._last: ForwardPass | None = None  # last committed decode step, from which the next one is derived
        self._undo: list[tuple[Block, int]] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pass": None, "_last": None}  # plans of passes hold kernel buffers

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
        """Delete a block and release its memory."""
        self._check_owned(block)
        self._last = None
        self.blocks.remove(block)
        self.arena.release(block.extent)

    def truncate(self, block: Block, length: int) -> None:
        """Remove the tokens of a block from index `length` on, which must be between 0 and the block's length."""
        self._check_owned(block)
        if not 0 <= length <= block.length:
            raise ValueError(f"length must be between 0 and the block's {block.length}, got {length}")
        block.length = length

    def split(self, block: Block, at: int) -> Block:
        """Split a block in two without copying: it keeps `at` tokens, the returned block holds the others."""
        self._check_owned(block)
        if not 0 < at < block.length:
            raise ValueError(f"at must lie inside the block's {block.length} tokens, got {at}")
        tail = Block(block.extent, block.base + at, block.first + at, block.length - at)
        block.extent.owners += 1
        block.length = at
        self.blocks.add(tail)
        return tail

    def fork(self, block: Block, extra_capacity: int = 0) -> Block:
        """Copy a block's tokens into a new block with capacity for `extra_capacity` more."""
        self._check_owned(block)
        copy = self.new_block(block.length + extra_capacity, block.base)
        try:
            self.arena.copy(block.tokens, copy.extent.range(0, block.length))
        except BaseException:
            self.free(copy)
            raise
        copy.length = block.length
        return copy

    def move(self, source: Block, target: Block) -> None:
        """Move all tokens of `source` to the end of `target`, with keys rotated to their new positions.

        Copies only these tokens; `source` is empty afterwards. Raises `ValueError` if the blocks are the same, or if
        positions change and the rotary embedding is unknown.
        """
        self._check_owned(source)
        self._check_owned(target)
        if source is target:
            raise ValueError("a block cannot be moved into itself")
        delta = target.base + target.length - source.base
        if delta and self.rotary is None:
            raise ValueError("moving a block to other positions needs the rotary embedding of the model's layers")
        self.reserve([(target, target.length + source.length)])
        end = target.extent.range(target.first + target.length, source.length)
        self.arena.copy(source.tokens, end, delta, self.rotary)
        target.length += source.length
        source.length = 0

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """Ensure capacity for `length` tokens in each `(block, length)`.

        A block that must grow moves to an extent of at least twice its size, so that a token is copied a bounded
        number of times. Blocks of equal extents that grow together stay evenly spaced.
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

    def reset(self) -> None:
        """Delete everything and release all memory; the cache can then be used with another model."""
        self.arena = Arena()
        self.blocks = set()
        self._pass = self._last = None
        self._undo = []

    def _check_owned(self, block: Block) -> None:
        if block not in self.blocks:
            raise ValueError(f"{block!r} is not (or no longer) a block of this cache")

    # Forward passes

    def prepare(self, segments: Sequence[Segment]) -> ForwardPass:
        """Allocate memory for the new tokens of a forward pass and lay it out.

        Parameters
        ----------
        segments : sequence of Segment
            New tokens of each row, in packed order.

        Raises
        ------
        ValueError
            If a segment is empty, reads tokens or blocks that do not exist, or writes to the block of another
            segment; or if a block is seen at a position other than its own and the rotary embedding is unknown.
        """
        if self._last is not None and self._last.leads_to(segments):
            self._undo = [(segment.view[-1], segment.view[-1].length) for segment in segments]
            for segment in segments:
                segment.view[-1].length += 1
            return self._begin(self._last.next_step())
        return self.prepare_run([segments])

    def prepare_run(self, passes: Sequence[Sequence[Segment]]) -> ForwardPass:
        """Lay out several consecutive passes whose tokens are all known as one forward pass.

        A query sees the blocks as long as they were in its own pass, at the positions of that pass. So the logits
        equal those of separate passes, and decode steps that are known in advance (replayed, restored from their
        tokens, or trained on) cost one forward pass.

        Parameters
        ----------
        passes : sequence of sequence of Segment
            At least one. Each is the argument of `prepare` if the preceding passes had been computed. Blocks in
            their views must not be moved, split or truncated between passes.

        Returns
        -------
        ForwardPass
            All segments in packed order, pass by pass. Several passes need block attention.

        Raises
        ------
        ValueError
            As `prepare`, or if `passes` is empty.
        """
        if not passes:
            raise ValueError("a run needs at least one pass, got none")
        new_tokens = self._check(passes)
        self.reserve([(block, block.length + n) for block, n in new_tokens.items()])
        self.arena.grow()
        self._undo = [(block, block.length) for block in new_tokens]
        planner = PassPlanner()
        for segments in passes:
            for segment in segments:
                segment.view[-1].length += segment.num_tokens if segment.write else 0
            planner.add(segments)
        return self._begin(planner.build(self.device))

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
                    self._check_owned(block)
                target = segment.view[-1]
                if not segment.write and segment.num_tokens > target.length + new_tokens[target]:
                    raise ValueError(f"a segment cannot reread more tokens than its block holds, got {segment!r}")
                if target in written or (segment.write and target in read):
                    raise ValueError(
                        "two segments of a forward pass write to one block, or one rereads what the other writes"
                    )
                (written if segment.write else read).add(target)
                if segment.write:
                    new_tokens[target] += segment.num_tokens
        return new_tokens

    def _begin(self, forward: ForwardPass) -> ForwardPass:
        """Make a pass the prepared one."""
        if self.rotary is None and forward.plan.rotates:
            self.rollback()
            raise ValueError("seeing a block at another position than its own needs the rotary embedding of the layers")
        self._pass = forward
        return forward
