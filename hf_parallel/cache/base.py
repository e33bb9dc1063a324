"""`BlockCache`: blocks of keys and values as a `transformers.Cache` (docs/block_attention.md).

`update` stores the packed new tokens and returns them; block attention reads the blocks in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_parallel.cache.batch import ForwardPass, Segment, new_tokens, plan_passes
from hf_parallel.cache.pass_log import PassLog
from hf_parallel.cache.pool import Block, Pool
from hf_parallel.kernels import AttentionPlan, RotarySpec


class BlockCache(Cache):
    """Keys and values in blocks of a `pool`, each stored once, however many rows see it.

    Rows see blocks of different lengths at different positions, so only block attention can read them: pass the cache
    to `generate` with a mode. `layers` is empty, as blocks hold the keys and values of all layers; `len()` is the
    number of the model's layers.

    Parameters
    ----------
    rotary : mapping of int to RotarySpec or None, optional
        Rotary embedding by layer index (None: the layer has none). Needed only if blocks are moved or seen at
        positions other than those that they were written for.
    device : torch.device, optional
        Device of position ids; the storage is on the device of the model's keys. Default: the CPU, and in the modes
        the device of the model.
    pool : Pool, optional
        Pool of the blocks. Default: a new one.
    """

    in_use = False
    """Whether block attention reads the blocks. `models.attention.block_attention_enabled` sets it."""

    def __init__(
        self,
        rotary: Mapping[int, RotarySpec | None] | None = None,
        device: torch.device | str | None = None,
        *,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.pool = Pool(rotary) if pool is None else pool
        self.rotary = self.pool.rotary
        self.log: PassLog | None = None
        self.device, self._has_device = torch.device(device or "cpu"), device is not None
        self._forget_passes()

    def reset(self) -> None:
        """Delete everything and release all memory; the cache can then be used with another model."""
        self.pool.clear()
        self._forget_passes()

    def _forget_passes(self) -> None:
        self._pass: ForwardPass | None = None
        self._last: ForwardPass | None = None  # last committed decode step, from which the next one is derived
        self._undo: list[tuple[Block, int]] = []

    def record(self, log: PassLog) -> None:
        """Record passes, samples and copies in a log, until there is another one."""
        self.log, self.pool.on_copy = log, log.add_copy

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pass": None, "_last": None, "log": None}  # plans of passes hold kernel buffers

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all unique tokens."""
        return self.pool.kv_bytes

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
        last, pool = self._last, self.pool
        is_next = last is not None and last.version == pool.version and self._pass is None and len(passes) == 1
        if is_next and last is not None and last.leads_to(passes[0]):
            self._undo = [(segment.view[-1], segment.view[-1].length) for segment in last.segments]
            for block, length in self._undo:
                block.length = length + 1
            forward = last.next_step()
        else:
            count = new_tokens(pool, passes)
            pool.reserve([(block, block.length + n) for block, n in count.items()])
            pool.arena.grow()
            self._undo = [(block, block.length) for block in count]
            forward = plan_passes(passes, self.device)
            forward.version = pool.version
        if self.rotary is None and forward.plan.pair_delta.any():
            self.rollback()
            raise ValueError("a block seen at another position than its own needs the rotary embedding: pass rotary=")
        self._pass = forward
        return forward

    @property
    def plan(self) -> AttentionPlan:
        """Attention plan of the prepared pass."""
        if self._pass is None:
            raise RuntimeError("no forward pass is prepared: was the model called from a processor or a streamer?")
        return self._pass.plan

    def commit(self) -> None:
        """Confirm that the prepared pass has been computed."""
        if self._pass is not None:
            self._last = self._pass if self._pass.plan.increments is not None else None
        self._undo, self._pass = [], None

    def rollback(self) -> None:
        """Restore the block lengths from before the prepared pass, if it was not committed."""
        for block, length in self._undo:
            block.length = length
        self._undo, self._pass = [], None

    def take_back(self) -> ForwardPass:
        """Remove the tokens of the last pass, a committed decode step, and return it; see `put_back`."""
        step, self._last = self._last, None
        if step is None or step.version != self.pool.version:
            raise RuntimeError("the last pass was not a decode step, or a block has changed after it")
        for segment in step.segments:
            segment.view[-1].length -= 1
        return step

    def put_back(self, step: ForwardPass, rows: Sequence[int]) -> None:
        """Append the tokens of some segments of a pass again, to whose blocks nothing was written since `take_back`."""
        for row in rows:
            step.segments[row].view[-1].length += 1
        self._last = step if len(rows) == len(step.segments) else None

    # transformers.Cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values `[1, kv_heads, T, head_dim]`, rotated to the pass's position ids.

        Returns them unchanged but for autocast, under which they get its dtype. In a compiled layer, the attention
        operation stores them. Raises `ValueError` in a pass without block attention.
        """
        device = key_states.device.type
        if torch.is_autocast_enabled(device):  # also while a layer is traced: its compiled code runs without
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if torch.compiler.is_compiling():
            return key_states, value_states
        if not self.in_use:
            raise ValueError(
                f"a plain forward pass cannot use a {type(self).__name__}: pass it to generate with the mode that "
                "filled it"
            )
        plan = self.plan if self._pass is None else self._pass.plan  # `plan` raises
        self.pool.arena.write(layer_idx, key_states[0], value_states[0], plan)
        return key_states, value_states

    def __len__(self) -> int:
        return len(self.pool.arena.layers)

    def __repr__(self) -> str:
        blocks = self.pool.blocks
        return f"{type(self).__name__}({len(blocks)} blocks, {sum(block.length for block in blocks)} tokens)"
