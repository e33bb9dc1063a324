"""DenseRows: rows under a model's own attention, which reads a temporary dense copy of each row's keys and values.

A layer copies them in one operation; their places are found once per pass, from its attention plan. Blocks stay stored
once. Serves models whose attention cannot read blocks, plain `generate` over a `BlockCache`, and tests as an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from hf_parallel.cache.batch import ForwardPass, Segment, View, ranges, view_length
from hf_parallel.cache.pool import Pool
from hf_parallel.cache.state_plan import StateCall, StatePlan
from hf_parallel.kernels import (
    FIRST_QUANTIZED,
    AttentionPlan,
    LayerStorage,
    RotarySpec,
    rotate,
    storage_row,
    table_dtype,
    to_device,
)


@dataclass(eq=False)
class DenseBatch:
    """Rows of a pass with equally many new tokens, left-padded to the longest: one call of the model."""

    tokens: np.ndarray  # int64 [rows, n], packed indices of the new tokens
    mask: torch.Tensor  # int64 [rows, length], of the device of the cache
    plan: AttentionPlan  # stores the new tokens of these rows
    places: np.ndarray
    """`int64 [3, rows, length]`. Origin and capacity of each key's extent, and its index there."""
    delta: np.ndarray  # int64 [rows, length], by which the keys are rotated
    state_call: StateCall | None = None  # of the modules that keep states
    updated: set[int] = field(default_factory=set)  # layers that the model has updated
    _made: dict[Hashable, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    """Arguments of `LayerStorage.gather`, by number of KV heads and device."""

    def past(self, layer_idx: int) -> int:
        """Return the number of tokens, padding included, that a layer holds of each row."""
        length = self.mask.shape[1]
        return length if layer_idx in self.updated else length - self.tokens.shape[1]

    def states(self, layer: LayerStorage, spec: RotarySpec | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's keys and values `[rows, kv_heads, length, head_dim]`.

        Keys are rotated to the positions that the queries of the row expect. Padding repeats another token.
        """
        heads = layer.num_kv_heads
        device = layer.keys.device
        if (heads, device) not in self._made:
            self._made[heads, device] = self._storage_rows(heads, device)
        stored_rows, is_quantized = self._made[heads, device]
        num_rows, length = self.delta.shape
        keys, values = layer.gather(stored_rows, is_quantized)
        keys = keys.view(num_rows, heads, length, -1)
        values = values.view(num_rows, heads, length, -1)
        if spec is None or not self.delta.any():
            return keys, values
        cos, sin = spec.tables(self.delta.reshape(-1), table_dtype(keys.dtype), device)
        cos = cos.view(num_rows, 1, length, -1)
        sin = sin.view(num_rows, 1, length, -1)
        if spec.of_values:
            return keys, rotate(values, cos, sin, spec)
        return rotate(keys, cos, sin, spec), values

    def _storage_rows(self, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows of a layer's storage in the order of `states`, and which are quantized (None: none)."""
        origin, capacity, index = self.places[:, :, None]
        rows = storage_row(origin, capacity, index, heads, np.arange(heads)[:, None])
        in_8_bits = np.broadcast_to(origin >= FIRST_QUANTIZED, rows.shape).reshape(-1)
        is_quantized = None
        if in_8_bits.any():
            is_quantized = to_device(in_8_bits, device, torch.bool)
        return to_device(rows.reshape(-1), device), is_quantized


def dense_batches(
    forward: ForwardPass, device: torch.device, padded: bool = True, states: StatePlan | None = None
) -> list[DenseBatch]:
    """Return the calls of the model that compute a pass, in order: rows may read what a row before them stores.

    Without `padded`, rows of a call are equally long. A block to which several passes append is one row.
    """
    plan = forward.plan
    position = plan.query_position(plan.pair_position)
    batches: list[DenseBatch] = []
    if states is None:

        def kind(row: list[int]) -> tuple[int, int]:
            return len(row), 0 if padded else int(position[row[-1]])

        groups = groupby(_rows(forward, position, kind), kind)
        for _, group in groups:
            rows = np.array([*group], np.int64)
            batches.append(_batch(plan, rows, position, device))
        return batches
    for call in states.calls:
        tokens = np.arange(plan.num_queries) if call.tokens is None else call.tokens.cpu().numpy()
        rows = tokens.reshape(call.num_rows, -1)
        lengths = position[rows[:, -1]]
        for length in np.unique(lengths):
            chosen = np.flatnonzero(lengths == length)
            states_call = call.of_rows(chosen.tolist())
            batches.append(_batch(plan, rows[chosen], position, device, states_call))
    return batches


def _rows(forward: ForwardPass, position: np.ndarray, kind: Callable[[list[int]], tuple[int, int]]) -> list[list[int]]:
    """Return the packed tokens of each row, rows of one kind side by side if none reads what another one stores."""
    rows = dict[View, list[list[int]]]()
    first = 0
    for segment in forward.segments:
        tokens = list(range(first, first + segment.num_tokens))
        first += segment.num_tokens
        parts = rows.setdefault(segment.view, [])
        if parts and position[parts[-1][-1]] + 1 == position[tokens[0]]:
            parts[-1] += tokens
        else:
            parts.append(tokens)
    all_rows = [row for parts in rows.values() for row in parts]
    written = {view[-1] for view in rows}
    for view in rows:
        if not written.isdisjoint(view[:-1]):
            return all_rows
    return sorted(all_rows, key=kind)


def _batch(
    plan: AttentionPlan,
    tokens: np.ndarray,
    position: np.ndarray,
    device: torch.device,
    state_call: StateCall | None = None,
) -> DenseBatch:
    """Lay out the keys that the last query of each row sees; `position` is the queries' in their views."""
    last = tokens[:, -1]
    num_rows = len(last)
    length = int(position[last].max()) + 1
    row_of = np.full(plan.num_queries, -1)  # row of each last query
    row_of[last] = np.arange(num_rows)
    index_of = np.full(plan.num_queries, -1)  # index of each query among the tokens of the batch
    index_of[tokens.reshape(-1)] = np.arange(tokens.size)
    pairs = np.flatnonzero(row_of[plan.pair_query] >= 0)
    block = np.repeat(np.arange(plan.num_blocks), np.diff(plan.block_pairs))[pairs]
    seen = plan.pair_hi[pairs]
    pair = np.repeat(np.arange(len(pairs)), seen)
    index = ranges(np.zeros_like(seen), seen)
    row = row_of[plan.pair_query[pairs]][pair]
    column = length - 1 - plan.pair_position[pairs][pair] + index
    key = np.full((num_rows, length), -1)
    key[row, column] = np.arange(len(pair))
    places = np.stack(
        (
            plan.block_origin[block][pair],
            plan.block_capacity[block][pair],
            plan.block_first[block][pair] + index,
        )
    )
    writes = np.flatnonzero(index_of[plan.write_query] >= 0)
    writes = writes[np.argsort(index_of[plan.write_query[writes]])]
    stored = replace(
        plan,
        num_queries=tokens.size,
        write_query=index_of[plan.write_query[writes]],
        write_origin=plan.write_origin[writes],
        write_capacity=plan.write_capacity[writes],
        write_index=plan.write_index[writes],
        derived={},
        windows={},
    )
    mask = to_device((key >= 0).reshape(-1), device).view(key.shape)
    delta = -plan.pair_delta[pairs][pair][key]
    return DenseBatch(tokens, mask, stored, places[:, key], delta, state_call)


class DenseRows:
    """Views of the rows of a batch in plain forward passes, and the running call of the model."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.views: list[View] = []
        self.batch: DenseBatch | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the longest row."""
        return max(map(view_length, self.views), default=0)

    def next_segments(self, batch: int, length: int) -> list[Segment]:
        """Return the segments that append `length` tokens to each row of a batch, which starts without rows."""
        if not self.views:
            self.views = [[block] for block in self.pool.new_blocks(batch, length)]
        if len(self.views) != batch:
            raise ValueError(f"this cache has {len(self.views)} rows, the batch has {batch}")
        for view in self.views:
            last_position = view[-1].base + view[-1].length
            if view_length(view) != self.length or last_position != self.length:
                raise ValueError(
                    "rows of unequal lengths, or that see blocks at other positions than their own, need prepare(): "
                    "pass its position_ids and the cache's attention_mask() to the model"
                )
        return [Segment(view, length) for view in self.views]
