"""Block attention with PyTorch's own kernels, on any device.

Each call of the schedule is one dense attention call that also returns the log-sum-exp; partial results are merged
exactly (Hydragen, eq. 5). On a CPU, the compiled kernel of `native.py` computes all calls of a pass at once; it reads
each block once for all heads and rows of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_parallel.kernels import native
from hf_parallel.kernels.dense import dense_attention
from hf_parallel.kernels.plan import AttentionParams, AttentionPlan, Derived, LatentHeads
from hf_parallel.kernels.rope import RotarySpec, rotate, rotate_by, table_dtype
from hf_parallel.kernels.schedule import DenseCall, Schedule, make_schedule
from hf_parallel.kernels.storage import QuantizedStorage, TokenRange, dequantize, storage_row
from hf_parallel.kernels.tiles import Tiles, make_tiles
from hf_parallel.kernels.transfer import to_device

UNFOLDED_QUERIES = 32  # queries per block from which folding grouped heads is not faster than one product per head
MASK_ALIGNMENT = 16  # elements; alignment of a mask's rows that PyTorch's memory-efficient attention requires on a GPU

_TILES = "tiles"  # key of a plan's tiles among what is derived from it
StridedView = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides and offset for `torch.as_strided`
Tables = tuple[Tensor, Tensor] | None
"""Cosines and sines `[N * M, 1, rotary_dim / 2]` of a call; None: no query is rotated."""


class _DenseShape(NamedTuple):
    """Properties of layers that share the prepared calls of a schedule."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary: RotarySpec | None  # None: no query is rotated
    has_latents: bool
    expands_from: int | None  # of a layer that stores latents: number of queries from which it expands them
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class _PreparedCall:
    """A call of the schedule with everything that depends on the layer's shape only, not on its tensors."""

    call: DenseCall
    queries: slice | Tensor | None  # None: all of them, in order
    tables: Tables
    folds: bool  # whether the heads of a group are folded into the row dimension
    mask: Tensor | None
    key_view: StridedView  # [N, kv_heads, L, head_dim]
    value_view: StridedView


@dataclass(frozen=True, eq=False)
class _LayerCalls:
    """The calls of a schedule for layers of one shape, by PyTorch."""

    schedule: Schedule
    dense: list[_PreparedCall]


@dataclass(frozen=True, eq=False)
class _NativeLayer(Derived):
    """The tiles of a plan for layers of one shape, computed by the C kernel."""

    shape: _DenseShape
    native: native.NativePlan

    def next_step(self, plan: AttentionPlan) -> _NativeLayer | None:
        """Return the layer of the next decode step."""
        tiles: Tiles | None = plan.derived.get(_TILES)
        if tiles is None:
            return None
        return replace(self, native=self.native.next_step(tiles, _rotation(plan, tiles, self.shape)))


@dataclass(frozen=True, eq=False)
class _Writes(Derived):
    """Storage rows of a pass's new tokens."""

    tokens: Tensor | None  # int64 [W], the packed tokens that are stored; None: all
    first: int
    spacing: tuple[int, int] | None  # from token to token and from head to head; None: they are not evenly spaced
    rows: Tensor  # int64 [kv_heads * W], head-major; empty if they are evenly spaced

    def next_step(self, plan: AttentionPlan) -> _Writes:
        """Return the rows of the next decode step: one further."""
        return replace(self, first=self.first + 1, rows=self.rows + 1)


class TorchBackend:
    """Block attention on any device. Other backends derive from it.

    Methods read and write the storage of a layer, `keys` and `values` `[slots * kv_heads, head_dim]`.
    """

    capturable = False
    """Whether a CUDA graph can capture the kernels: all inputs that change are in device memory."""

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        params: AttentionParams,
        quantized: QuantizedStorage | None = None,
    ) -> Tensor:
        """Return the attention of packed queries; see `hf_parallel.kernels.block_attention`.

        Raises `ValueError` on a GPU if `params` ask for results that are `batch_invariant`.
        """
        if params.batch_invariant and query.device.type == "cuda":
            raise ValueError(
                "batch_invariant=True on a GPU needs Triton's kernels: HF_PARALLEL_BACKEND chooses others, or they do "
                f"not support heads of {keys.shape[1]} and {values.shape[1]} in {keys.dtype}"
            )
        latent = params.latent
        dims = query.shape[1], params.num_kv_heads, keys.shape[1], values.shape[1]
        calls = _calls_of(plan, dims, params, query.dtype, query.device)
        if isinstance(calls, _NativeLayer):
            settings = calls.native, params.num_kv_heads, params.scale, params.sinks, params.softcap
            if latent is None:
                return native.attend(query, keys, values, *settings, quantized=quantized)
            lead = query.shape[2] - latent.key_dim
            absorbed = native.latent_products(query[..., lead:], latent.keys, absorbs=True).to(query.dtype)
            absorbed = torch.cat((query[..., :lead], absorbed), dim=-1)
            sums = native.attend(absorbed, keys, keys, *settings, leads=values, quantized=quantized)
            return native.latent_products(sums, latent.values, absorbs=False).to(query.dtype)
        outs = []
        lses = []
        for call in calls.dense:
            q = query if call.queries is None else query[call.queries]
            if call.tables is not None and params.rotary is not None:
                q = rotate(q, *call.tables, params.rotary)
            if quantized is not None and call.call.is_quantized:
                scales = quantized.scales.as_strided(*_strided_view(call.call, params.num_kv_heads, 2))
                keys_in_8_bits = quantized.keys.as_strided(*call.key_view)
                values_in_8_bits = quantized.values.as_strided(*call.value_view)
                k = dequantize(keys_in_8_bits, scales[..., 0], query.dtype)
                v = dequantize(values_in_8_bits, scales[..., 1], query.dtype)
            else:
                k = keys.as_strided(*call.key_view)
                v = values.as_strided(*call.value_view)
            if latent is None:
                out, lse = _attend(q, k, v, call, params.scale, params.softcap)
            elif call.folds:
                stored_keys = torch.cat((v, k), -1)
                out, lse = _attend(latent.absorb(q), stored_keys, k, call, params.scale, params.softcap)
                out = latent.project(out)
            else:
                k, v = latent.expand(k, v)
                out, lse = _attend(q, k, v, call, params.scale, params.softcap)
            outs.append(out)
            lses.append(lse)
        return _merge(outs, lses, calls.schedule, params.sinks, query)

    def append(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, plan: AttentionPlan) -> None:
        """Store the new keys and values `[kv_heads, T, head_dim]` of a pass at the locations that its plan gives."""
        key = "writes", new_keys.shape[0], keys.device
        writes: _Writes = plan.derived.get(key) or plan.cached(key, lambda: _writes(plan, *key[1:]))
        if writes.tokens is not None:
            new_keys = new_keys.index_select(1, writes.tokens)
            new_values = new_values.index_select(1, writes.tokens)
        for storage, new in ((keys, new_keys), (values, new_values)):
            dim = new.shape[2]
            if writes.spacing is not None:
                token, head = writes.spacing
                strides = (head * dim, token * dim, 1)
                storage.as_strided(new.shape, strides, writes.first * dim).copy_(new)
            else:
                storage.index_copy_(0, writes.rows, new.reshape(-1, dim))

    def move(
        self,
        keys: Tensor,
        values: Tensor,
        num_kv_heads: int,
        source: TokenRange,
        target: TokenRange,
        delta: int = 0,
        rotary: RotarySpec | None = None,
    ) -> None:
        """Copy tokens to a range of the same length that does not overlap; rotate their keys by `delta` positions.

        Without `rotary` (a layer without RoPE), keys are not rotated.
        """
        from_rows = source.rows(num_kv_heads, keys.device).reshape(-1)
        to_rows = target.rows(num_kv_heads, keys.device).reshape(-1)
        moved = keys[from_rows]
        if delta and rotary is not None:
            moved = rotate_by(moved, delta, rotary)
        keys[to_rows] = moved
        values[to_rows] = values[from_rows]


def _writes(plan: AttentionPlan, num_kv_heads: int, device: torch.device) -> _Writes:
    """Locate the new tokens. Those of one row, and of a decode step over adjacent blocks, are evenly spaced."""
    stored: Tensor | None = None
    if len(plan.write_query) != plan.num_queries:
        stored = torch.from_numpy(plan.write_query).to(device)
    rows = storage_row(plan.write_origin, plan.write_capacity, plan.write_index, num_kv_heads)
    steps = np.diff(rows) if len(rows) > 1 else np.ones(1, np.int64)
    are_even = len(rows) > 0 and steps[0] > 0 and (steps == steps[0]).all()
    if are_even and (plan.write_capacity == plan.write_capacity[0]).all():
        spacing = int(steps[0]), int(plan.write_capacity[0])
        return _Writes(stored, int(rows[0]), spacing, torch.empty(0, dtype=torch.int64))
    return _Writes(stored, 0, None, write_rows(plan, num_kv_heads, device))


def write_rows(plan: AttentionPlan, num_kv_heads: int, device: torch.device) -> Tensor:
    """Return the rows of a layer's storage in which new tokens are stored: `int64 [kv_heads * W]`, head-major."""
    heads = np.arange(num_kv_heads, dtype=np.int64)[:, None]
    rows = storage_row(plan.write_origin, plan.write_capacity, plan.write_index, num_kv_heads, heads)
    return to_device(rows.reshape(-1), device)


def _calls_of(
    plan: AttentionPlan,
    dims: tuple[int, int, int, int],
    params: AttentionParams,
    dtype: torch.dtype,
    device: torch.device,
) -> _NativeLayer | _LayerCalls:
    """Return the calls of a plan for a layer; `dims`: heads, KV heads, and the sizes of stored keys and values."""
    if params.window is not None or params.chunk is not None:
        plan = plan.windowed(params.window, params.chunk)
    rotary = params.rotary if plan.rotates else None
    latent = params.latent
    # The rotary embedding by identity: layers share equal ones, and hashing its frequencies takes time.
    kind = None if latent is None else latent.expands
    key = *dims, id(rotary), kind, dtype, device
    calls: _NativeLayer | _LayerCalls | None = plan.derived.get(key)
    if calls is None:
        expands_from = None if latent is None or not latent.expands else _expands_from(latent)
        shape = _DenseShape(*dims, rotary, latent is not None, expands_from, dtype, device)
        calls = plan.cached(key, lambda: _layer_calls(plan, shape))
    return calls


def native_plan(
    plan: AttentionPlan,
    dims: tuple[int, int, int, int],
    params: AttentionParams,
    dtype: torch.dtype,
    device: torch.device,
) -> native.NativePlan | None:
    """Return a plan as the C kernel reads it for a layer, None if PyTorch computes it; arguments as of `_calls_of`."""
    calls = _calls_of(plan, dims, params, dtype, device)
    return calls.native if isinstance(calls, _NativeLayer) else None


def _layer_calls(plan: AttentionPlan, shape: _DenseShape) -> _NativeLayer | _LayerCalls:
    if _is_native(int(np.diff(plan.block_pairs).max(initial=0)), shape):
        tiles = plan.cached(_TILES, lambda: make_tiles(plan))
        rotation = _rotation(plan, tiles, shape)
        queries = plan.pair_query[tiles.pairs]
        return _NativeLayer(shape, native.NativePlan.of(tiles, queries, shape.kv_heads, rotation))
    schedule = plan.cached("schedule", lambda: make_schedule(plan))
    tables = _rotation_tables(plan, schedule.calls, shape)
    calls = zip(schedule.calls, tables, strict=True)
    return _LayerCalls(schedule, [_prepare(plan, call, table, shape) for call, table in calls])


def _rotation(plan: AttentionPlan, tiles: Tiles, shape: _DenseShape) -> native.Rotation:
    if shape.rotary is None:
        return None
    return shape.rotary.tables(plan.pair_delta[tiles.pairs], torch.float32, shape.device), shape.rotary.interleaved


def computes_natively(dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> bool:
    """Whether the C kernel computes all passes of layers with such heads, so that their bits never depend on a plan."""
    return native.supports(dtype, device, native.MAX_ROWS + 1, key_dim, value_dim)


def _is_native(num_queries: int, shape: _DenseShape) -> bool:
    """Whether the compiled kernel supports calls of at most `num_queries`: no latents are better expanded."""
    rows = num_queries * shape.heads // shape.kv_heads
    if not shape.has_latents:
        return native.supports(shape.dtype, shape.device, rows, shape.key_dim, shape.value_dim)
    if shape.expands_from is not None and num_queries >= shape.expands_from:
        return False
    return native.supports(shape.dtype, shape.device, rows, shape.key_dim, shape.key_dim, shape.value_dim)


def _expands_from(latent: LatentHeads) -> int:
    """Return the number of queries of a block from which it is faster to expand its latents than to attend to them.

    Per key and head, expanding takes `rank * (key_dim + value_dim)` products and then saves
    `2 * rank - key_dim - value_dim` for each query (TyphoonMLA, arXiv 2509.21081).
    """
    _, dims, rank = latent.weight.shape
    return -(-rank * dims // max(2 * rank - dims, 1))


def _prepare(plan: AttentionPlan, call: DenseCall, tables: Tables, shape: _DenseShape) -> _PreparedCall:
    folds = not call.causal and call.num_queries < (shape.expands_from or UNFOLDED_QUERIES)
    index = plan.pair_query[call.pairs]
    are_successive = (call.pairs >= 0).all() and (np.diff(index) == 1).all()
    queries: slice | Tensor | None
    if not are_successive:
        queries = torch.from_numpy(index).to(shape.device)
    elif len(index) == plan.num_queries:
        queries = None
    else:
        queries = slice(int(index[0]), int(index[-1]) + 1)
    groups = shape.heads // shape.kv_heads if folds else 1
    return _PreparedCall(
        call,
        queries,
        tables,
        folds,
        mask=_mask(call, groups, shape),
        key_view=_strided_view(call, shape.kv_heads, shape.key_dim),
        value_view=_strided_view(call, shape.kv_heads, shape.value_dim),
    )


def _rotation_tables(plan: AttentionPlan, calls: Sequence[DenseCall], shape: _DenseShape) -> list[Tables]:
    if shape.rotary is None:
        return [None] * len(calls)
    deltas = []
    for call in calls:
        delta = plan.pair_delta[call.pairs]
        deltas.append(delta if delta.any() else delta[:0])
    cos, sin = shape.rotary.tables(np.concatenate(deltas), table_dtype(shape.dtype), shape.device)
    sizes = list(map(len, deltas))
    cos_parts = cos[:, None].split(sizes)
    sin_parts = sin[:, None].split(sizes)
    return [
        (cos_part, sin_part) if size else None
        for size, cos_part, sin_part in zip(sizes, cos_parts, sin_parts, strict=True)
    ]


def _strided_view(call: DenseCall, num_kv_heads: int, dim: int) -> StridedView:
    shape = call.num_blocks, num_kv_heads, call.num_keys, dim
    strides = call.spacing * num_kv_heads * dim, call.capacity * dim, dim, 1
    row = storage_row(call.origin, call.capacity, call.first, num_kv_heads)
    return shape, strides, row * dim


def _mask(call: DenseCall, groups: int, shape: _DenseShape) -> Tensor | None:
    """Additive mask of a call: `[N, 1, M * groups, L]`, or `[N, 1, 1, L]` if all queries of a block see the same."""
    if call.lo is None or call.hi is None:
        return None
    lo = call.lo
    hi = call.hi
    if (lo == lo[:, :1]).all() and (hi == hi[:, :1]).all():
        lo = lo[:, :1]
        hi = hi[:, :1]
        groups = 1
    aligned = -(-call.num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    key = torch.arange(aligned)
    after_start = key >= torch.from_numpy(lo)[..., None]
    before_end = key < torch.from_numpy(hi)[..., None]
    visible = after_start & before_end  # [N, M, L]
    mask = torch.zeros(visible.shape, dtype=shape.dtype)
    mask.masked_fill_(~visible, float("-inf"))
    folded = mask.repeat_interleave(groups, dim=1)[:, None]
    return folded.to(shape.device)[..., : call.num_keys]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: _PreparedCall, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """One dense call of queries `[N * M, heads, head_dim]` to keys and values `[N, kv_heads, L, head_dim]`.

    Heads that share a KV head are folded with the queries into one row dimension, so that keys are read once per KV
    head. They are not folded in a causal call, or from `UNFOLDED_QUERIES` queries per block. Returns the output
    `[N * M, heads, head_dim]` and the log-sum-exp `[N * M, heads]`.
    """
    n = len(k)
    m = len(q) // len(k)
    kv_heads = k.shape[1]
    causal = call.call.causal
    mask = call.mask
    total, heads, dim = q.shape
    groups = heads // kv_heads
    if not call.folds:
        by_head = q.view(n, m, heads, dim).transpose(1, 2)
        out, lse = dense_attention(by_head, k, v, mask, causal, scale, softcap)
        out = out.transpose(1, 2)
        lse = lse.transpose(1, 2)
    elif m == 1:
        out, lse = dense_attention(q.view(n, kv_heads, groups, dim), k, v, mask, False, scale, softcap)
    else:
        folded = q.view(n, m, kv_heads, groups, dim).transpose(1, 2).reshape(n, kv_heads, m * groups, dim)
        out, lse = dense_attention(folded, k, v, mask, False, scale, softcap)
        out = out.view(n, kv_heads, m, groups, -1).transpose(1, 2)
        lse = lse.view(n, kv_heads, m, groups).transpose(1, 2)
    return out.reshape(total, heads, -1), lse.reshape(total, heads)


def _merge(outs: list[Tensor], lses: list[Tensor], schedule: Schedule, sinks: Tensor | None, query: Tensor) -> Tensor:
    """Merge partial results by their log-sum-exp (Hydragen, eq. 5); a sink is one more result, whose output is zero."""
    count = len(schedule.merge)
    is_simple = sinks is None and schedule.in_order
    if is_simple and count == 1:
        return outs[0] if len(outs) == 1 else torch.cat(outs)
    if is_simple and count == 2 and [len(out) for out in outs] == [len(query), len(query)]:
        weight = torch.sigmoid(lses[1] - lses[0])[..., None]
        first = outs[0].to(weight.dtype)
        second = outs[1].to(weight.dtype)
        return torch.lerp(first, second, weight).to(query.dtype)
    out = torch.cat(outs)
    lse = torch.cat(lses)
    if schedule.in_order:
        out = out.unflatten(0, (count, -1))
        lse = lse.unflatten(0, (count, -1))
    else:
        index, missing = schedule.merge_index(query.device)
        out = out[index]
        lse = lse[index]
        if missing is not None:
            lse = lse.masked_fill(missing, float("-inf"))
    if sinks is not None:
        sink_lse = sinks.to(lse.dtype).expand(1, *lse.shape[1:])
        lse = torch.cat((lse, sink_lse))
    weights = lse.softmax(dim=0)[:count, ..., None]
    weighted = out.to(weights.dtype) * weights
    return weighted.sum(dim=0).to(query.dtype)
