"""`BlockCache`: blocks of keys and values as a `transformers.Cache` (docs/block_attention.md).

Under block attention, `update` stores the packed new tokens and returns them; attention reads the blocks in place.
Under a stock attention implementation, it returns each row's keys and values densely (`dense_rows.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_parallel.cache.batch import ForwardPass, Segment, View, new_tokens, plan_passes
from hf_parallel.cache.dense_rows import DenseBatch, DenseRows, dense_batches
from hf_parallel.cache.pass_log import PassLog
from hf_parallel.cache.pool import Block, Pool
from hf_parallel.cache.state_plan import StatePlan, plan_states
from hf_parallel.kernels import AttentionPlan, RotarySpec, to_device


@dataclass(frozen=True)
class LayerReads:
    """Keys that a layer reads, where the arguments of its attention do not say it."""

    source: int
    """Layer that stores the keys: the layer itself, or an earlier one (Gemma 3n)."""
    window: int | None = None
    """Sliding window that only the attention mask has."""
    chunk: int | None = None
    """A query sees the keys of its own chunk of so many positions (Llama 4)."""
    counts: bool = False
    """Whether the layer scales queries by positions that it counts from the length of the cache (Llama 4)."""


class BlockCache(Cache):
    """Keys and values in blocks of a `pool`, each stored once, however many rows see it.

    Pass it to `generate` with a mode, or to a plain forward pass or `generate`, which is slow: stock attention reads
    dense copies of the rows. `layers` is empty, as blocks hold the keys and values of all layers; `len()` is the
    number of the model's layers.

    Parameters
    ----------
    rotary : mapping of int to RotarySpec or None, optional
        Rotary embedding by layer index (None: the layer has none). Needed only if blocks are moved or seen at
        positions other than their own.
    device : torch.device, optional
        Device of position ids; the storage is on the device of the model's keys. Default: the CPU, and in the modes
        the device of the model.
    pool : Pool, optional
        Pool of the blocks. Default: a new one.
    """

    in_use = False
    """Whether block attention reads the blocks. `models.intercept.attention.block_attention_enabled` sets it."""
    batch_invariant = False
    """Whether attention has the same bits in every schedule, where that is slower: see `AttentionParams`. Latents are
    never expanded then (`LatentHeads`)."""
    reads: Mapping[int, LayerReads] = MappingProxyType({})
    """What layers read, by index, where their attention does not say it."""
    positions: torch.Tensor | None = None
    """`int64 [T]`. Position of each packed token in its row, while a model runs that has layers which count them."""

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
        self.updated_layer = -1
        self.device = torch.device(device or "cpu")
        self._has_device = device is not None
        self._forget_passes()

    def reset(self) -> None:
        """Delete everything and release all memory; the cache can then be used with another model."""
        self.pool.clear()
        self._forget_passes()

    def _forget_passes(self) -> None:
        self.dense = DenseRows(self.pool)
        self._pass: ForwardPass | None = None
        self._last: ForwardPass | None = None  # last committed decode step, from which the next one is derived
        self._undo: list[tuple[Block, int]] = []
        self._states: StatePlan | None = None  # of the last pass

    def log_to(self, log: PassLog) -> None:
        """Record passes, samples and copies in a log, until there is another one."""
        self.log = log
        self.pool.on_copy = log.add_copy

    def __getstate__(self) -> dict[str, object]:
        # Plans of passes hold kernel buffers.
        return self.__dict__ | dict.fromkeys(("_pass", "_last", "_states", "log"))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all unique tokens."""
        return self.pool.kv_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that layers keep instead of keys."""
        num_states = sum(block.state >= 0 for block in self.pool.blocks)
        return num_states * self.pool.states.bytes_per_slot

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
        last = self._last
        pool = self.pool
        is_next = last is not None and last.version == pool.version and self._pass is None and len(passes) == 1
        states = self._states.next_step() if is_next and self._states is not None else None
        if is_next and last is not None and last.leads_to(passes[0]) and (states or not pool.states.in_use):
            self._undo = []
            for segment in last.segments:
                block = segment.view[-1]
                self._undo.append((block, block.length))
                block.length += 1
            forward = last.next_step()
        else:
            count = new_tokens(pool, passes)
            pool.reserve([(block, block.length + n) for block, n in count.items()])
            pool.arena.grow()
            self._undo = [(block, block.length) for block in count]
            states = plan_states(pool.states, passes, self.device) if pool.states.in_use else None
            forward = plan_passes(passes, self.device)
            forward.version = pool.version
        if self.rotary is None and forward.plan.pair_delta.any():
            self.rollback()
            raise ValueError("a block seen at another position than its own needs the rotary embedding: pass rotary=")
        self._states = states
        for block in () if states is None else states.blocks:
            block.state_at = -1  # until `commit`
        self._pass = forward
        self.dense.batch = None
        return forward

    def adopt(self, forward: ForwardPass) -> None:
        """Prepare a pass that another process has planned for blocks at the same places of its storage."""
        forward.position_ids = forward.position_ids.to(self.device)
        self._pass = forward
        self.dense.batch = None

    def plan_of(self, layer_idx: int = -1) -> AttentionPlan:
        """Return the attention plan of a layer in the prepared pass. Each layer calls it once."""
        step = self._pass
        if step is None:
            raise RuntimeError("no forward pass is prepared: was the model called from a processor or a streamer?")
        in_order = step.in_order
        return step.plan if in_order is None or layer_idx in step.images[0].image.bidirectional_layers else in_order

    plan = property(plan_of)

    def positions_in_rows(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the position `int64 [T]` of each packed token of the prepared pass in its row's view.

        These are `position_ids`, to which it is rotated, unless the row sees blocks at other positions than their own.
        Raises `ValueError` if such a row has masked tokens.
        """
        assert self._pass is not None, "no forward pass is prepared"
        if not self.plan.rotates:
            return position_ids
        if any(block.gap for segment in self._pass.segments for block in segment.view):
            raise ValueError("the model scales queries by their position: prompts cannot have masked tokens inside")
        return to_device(self.plan.query_position(self.plan.pair_position), self.device)

    @property
    def state_plan(self) -> StatePlan:
        """Plan of the layers that keep states in the prepared pass."""
        assert self._states is not None, "the pass was prepared without states"
        return self._states

    def commit(self) -> None:
        """Confirm that the prepared pass has been computed."""
        if self._pass is not None:
            self._last = self._pass if self._pass.plan.increments is not None else None
            for block in () if self._states is None else self._states.blocks:
                block.state_at = block.length
        self._undo = []
        self._pass = None

    def rollback(self) -> None:
        """Restore the block lengths from before the prepared pass, if it was not committed."""
        for block, length in self._undo:
            block.length = length
        if self._states is not None:  # they may be half written
            self._states = None
            self._last = None
        self._undo = []
        self._pass = None

    def take_back(self) -> ForwardPass:
        """Remove the tokens of the last pass, a committed decode step, and return it; see `put_back`."""
        step = self._last
        self._last = None
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
        """Store a layer's new keys and values, rotated to the pass's position ids.

        They are `[1, kv_heads, T, head_dim]`, or under stock attention `[rows, kv_heads, n, head_dim]`. Returns them
        unchanged, or under stock attention each row's whole view, left-padded to the longest:
        `[rows, kv_heads, L, head_dim]`. Under autocast, keys and values get its dtype. In a compiled layer, the
        attention operation stores them.
        """
        device = key_states.device.type
        if torch.is_autocast_enabled(device):  # also while a layer is traced: its compiled code runs without
            dtype = torch.get_autocast_dtype(device)
            key_states = key_states.to(dtype)
            value_states = value_states.to(dtype)
        if torch.compiler.is_compiling():
            return key_states, value_states
        if self.in_use:
            plan = self.plan if self._pass is None else self._pass.plan  # `plan` raises
            self.updated_layer = layer_idx
            self.pool.arena.write(layer_idx, key_states[0], value_states[0], plan)
            return key_states, value_states
        batch = self.dense.batch
        if self._pass is None or (batch is not None and layer_idx in batch.updated):  # the caller did not prepare it
            if self.pool.blocks and not self.rows:
                raise ValueError(
                    f"a plain forward pass cannot continue the rows of this {type(self).__name__}: pass it to generate "
                    "with the mode that filled it"
                )
            self.prepare(self.dense.next_segments(key_states.shape[0], key_states.shape[2]))
        batch = self._dense_batch()
        batch.updated.add(layer_idx)
        keys = key_states.transpose(0, 1).flatten(1, 2)
        values = value_states.transpose(0, 1).flatten(1, 2)
        self.pool.arena.write(layer_idx, keys, values, batch.plan)
        return batch.states(
            self.pool.arena.layers[layer_idx], None if self.rotary is None else self.rotary.get(layer_idx)
        )

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store the keys `[rows, n, dim]` of a sparse indexer; return those of the rows, `[rows, L, dim]`."""
        by_head = keys[:, None]
        first = by_head[..., :-1]  # in the place of keys
        last = by_head[..., -1:]  # in the place of values
        stored = self.update(first, last, -1 - layer_idx)
        return torch.cat(stored, dim=-1)[:, 0]

    def _dense_batch(self) -> DenseBatch:
        """Return the running call of a model with its own attention: all rows of the prepared pass, unless set."""
        if self.dense.batch is None:
            assert self._pass is not None
            batches = dense_batches(self._pass, self.device)
            if self._pass.num_passes > 1 or len(batches) > 1:
                raise ValueError("consecutive passes, or rows of unequal numbers of new tokens, need block attention")
            self.dense.batch = batches[0]
        return self.dense.batch

    def _refuse_state(self, *args: object, **kwargs: object) -> Any:
        raise ValueError(
            "layers that keep a state cannot use this cache in a plain forward pass: pass it to generate with the mode "
            "that filled it"
        )

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse_state

    @property
    def rows(self) -> list[View]:
        """Views of the batch under stock attention; empty under block attention."""
        return self.dense.views

    @rows.setter
    def rows(self, views: list[View]) -> None:
        """Set the views."""
        self.dense.views = views

    def attention_mask(self) -> torch.Tensor:
        """Return the mask `int64 [rows, longest]` of the dense rows, for a stock forward pass after `prepare`."""
        return self._dense_batch().mask

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest row in tokens, without tokens that a layer has yet to store.

        A layer that counts positions from it gets, under block attention, what yields each packed token's own.
        """
        if self.in_use:
            if self.positions is None or layer_idx not in self.reads or not self.reads[layer_idx].counts:
                return 0
            packed_positions = torch.arange(len(self.positions), device=self.positions.device)
            return self.positions - packed_positions  # type: ignore[return-value]
        has_stored = self.rows and self.dense.batch and layer_idx in self.dense.batch.updated
        if self._pass is None or has_stored:
            return self.dense.length
        return self._dense_batch().past(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the index of the first new token in the dense rows; 0 under block attention, which has none."""
        return 0 if self.in_use else self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the dense keys under stock attention."""
        return query_length + self.get_query_offset(layer_idx), 0

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return -1: a block cache has no maximum length."""
        return -1

    @property
    def batch_size(self) -> int:
        """Number of rows under stock attention; -1 if there are none yet."""
        return len(self.rows) or -1

    max_batch_size = batch_size

    def _refuse_rows(self, *args: object, **kwargs: object) -> Any:
        raise ValueError(
            "the rows of a block cache cannot be selected, repeated or cropped: use a DynamicCache for beam search and "
            "prompt lookup"
        )

    reorder_cache = batch_select_indices = batch_repeat_interleave = crop = _refuse_rows

    def __len__(self) -> int:
        return len(self.pool.arena.layers)

    def __repr__(self) -> str:
        blocks = self.pool.blocks
        num_tokens = sum(block.length for block in blocks)
        return f"{type(self).__name__}({len(blocks)} blocks, {num_tokens} tokens)"
