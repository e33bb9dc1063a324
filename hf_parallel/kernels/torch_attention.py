"""Block attention with PyTorch's own kernels, on any device.

Each call of the schedule is one dense attention call that also returns the log-sum-exp; partial results are merged
exactly (Hydragen, eq. 5). On a CPU in float32, the compiled kernel of `native.py` computes decode steps and short
appends; it reads each block once for all heads and rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_parallel.kernels import native
from hf_parallel.kernels.dense import dense_attention
from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.rope import RotarySpec, rotate, rotate_by, table_dtype
from hf_parallel.kernels.schedule import Call, Schedule, make_schedule
from hf_parallel.kernels.storage import LayerStorage, TokenRange, storage_row

UNPACKED_QUERIES = 32  # queries per block from which packing grouped heads is not faster than one product per head
NATIVE_RUN = 32  # queries of a block up to which the compiled kernel serves calls with a mask
MASK_ALIGNMENT = 16  # elements; alignment of a mask's rows that PyTorch's memory-efficient attention requires on a GPU

StridedView = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides and offset for `torch.as_strided`


class _LayerShape(NamedTuple):
    """Properties of a layer on which the prepared calls of a schedule depend."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary: RotarySpec | None  # None: no query is rotated
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class _PreparedCall:
    """A call of the schedule with everything that depends on the layer's shape only, not on its tensors."""

    call: Call
    queries: slice | Tensor | None  # None: all of them, in order
    tables: tuple[Tensor, Tensor] | None  # cosines and sines [N * M, 1, rotary_dim / 2]; None: no query is rotated
    packs: bool  # whether the heads of a group are packed into the row dimension
    mask: Tensor | None
    key_view: StridedView  # [N, kv_heads, L, head_dim]
    value_view: StridedView


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, params: AttentionParams
) -> Tensor:
    """Block attention; shapes as in `hf_parallel.kernels.block_attention`."""
    plan = plan.windowed(params.window)
    schedule = plan.cached("schedule", lambda: make_schedule(plan))
    rotary = params.rotary if plan.rotates else None
    dims = keys.shape[-1], values.shape[-1]
    shape = _LayerShape(query.shape[1], params.num_kv_heads, *dims, rotary, query.dtype, query.device)
    if params.softcap is None:
        native_calls = plan.cached(("native", shape), lambda: _prepare_native(plan, schedule, shape))
        if native_calls is not None:
            return native.attend(query, keys, values, native_calls, params.num_kv_heads, params.scale, params.sinks)[0]
    outs, lses = [], []
    for call in plan.cached(shape, lambda: [_prepare(plan, dense, shape) for dense in schedule.calls]):
        q = query if call.queries is None else query[call.queries]
        if call.tables is not None and rotary is not None:
            q = rotate(q, *call.tables, rotary)
        k, v = keys.as_strided(*call.key_view), values.as_strided(*call.value_view)
        out, lse = _attend(q, k, v, call, params.scale, params.softcap)
        outs.append(out)
        lses.append(lse)
    return _merge(outs, lses, schedule, params.sinks, query)


def _prepare_native(plan: AttentionPlan, schedule: Schedule, shape: _LayerShape) -> native.NativeCalls | None:
    """Calls for the compiled kernel; None if it does not support all of them (long runs of a row)."""
    for call in schedule.calls:
        rows = call.num_queries * shape.heads // shape.kv_heads
        long = (call.causal or call.lo is not None) and call.num_queries > NATIVE_RUN
        if long or not native.supports(shape.dtype, shape.device, rows, shape.key_dim, shape.value_dim):
            return None
    return native.NativeCalls([_native_call(plan, call, shape) for call in schedule.calls])


def _native_call(plan: AttentionPlan, call: Call, shape: _LayerShape) -> dict[str, Any]:
    _, (block_stride, head_stride, _, _), offset = _strided_view(call, shape.kv_heads, shape.key_dim)
    fields: dict[str, Any] = {"blocks": call.num_blocks, "queries": call.num_queries, "num_keys": call.num_keys}
    for name in ("key", "value"):
        fields |= {f"{name}_offset": offset, f"{name}_block": block_stride, f"{name}_head": head_stride}
    index = np.where(call.pairs < 0, -1, plan.pair_query[call.pairs])
    if not np.array_equal(index, np.arange(plan.num_queries)):
        fields |= {"query_index": torch.from_numpy(index), "repeats": int(np.bincount(index[index >= 0]).max() > 1)}
    tables = _rotation_tables(plan, call, shape)
    if tables is not None and shape.rotary is not None:
        half, interleaved = len(shape.rotary.inv_freq), int(shape.rotary.interleaved)
        fields |= {"cos": tables[0], "sin": tables[1], "half": half, "interleaved": interleaved}
    lo, hi = call.lo, call.hi
    if call.causal:
        lo, hi = np.zeros(call.num_queries, np.int64), np.arange(1, call.num_queries + 1, dtype=np.int64)
    if lo is not None and hi is not None:
        fields |= {"lo": torch.from_numpy(lo.reshape(-1)), "hi": torch.from_numpy(hi.reshape(-1))}
    return fields


def _prepare(plan: AttentionPlan, call: Call, shape: _LayerShape) -> _PreparedCall:
    packs = not call.causal and call.num_queries < UNPACKED_QUERIES
    index = plan.pair_query[call.pairs]
    queries: slice | Tensor | None
    if (call.pairs >= 0).all() and (np.diff(index) == 1).all():
        queries = None if len(index) == plan.num_queries else slice(int(index[0]), int(index[-1]) + 1)
    else:
        queries = torch.from_numpy(index).to(shape.device)
    mask = _mask(call, shape.heads // shape.kv_heads if packs else 1, shape)
    views = [_strided_view(call, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim)]
    return _PreparedCall(call, queries, _rotation_tables(plan, call, shape), packs, mask, *views)


def _rotation_tables(plan: AttentionPlan, call: Call, shape: _LayerShape) -> tuple[Tensor, Tensor] | None:
    delta = plan.pair_delta[call.pairs]
    if shape.rotary is None or not delta.any():
        return None
    cos, sin = shape.rotary.tables(delta, table_dtype(shape.dtype), shape.device)
    return cos[:, None], sin[:, None]


def _strided_view(call: Call, num_kv_heads: int, dim: int) -> StridedView:
    strides = call.spacing * num_kv_heads * dim, call.capacity * dim, dim, 1
    offset = storage_row(call.origin, call.capacity, call.first, num_kv_heads) * dim
    return (call.num_blocks, num_kv_heads, call.num_keys, dim), strides, offset


def _mask(call: Call, groups: int, shape: _LayerShape) -> Tensor | None:
    """Additive mask of a call: `[N, 1, M * groups, L]`, or `[N, 1, 1, L]` if all queries of a block see the same."""
    if call.lo is None or call.hi is None:
        return None
    lo, hi = call.lo, call.hi
    if (lo == lo[:, :1]).all() and (hi == hi[:, :1]).all():
        lo, hi, groups = lo[:, :1], hi[:, :1], 1
    key = torch.arange(-(-call.num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT)
    visible = (key >= torch.from_numpy(lo)[..., None]) & (key < torch.from_numpy(hi)[..., None])  # [N, M, L]
    mask = torch.zeros(visible.shape, dtype=shape.dtype).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(groups, dim=1)[:, None].to(shape.device)[..., : call.num_keys]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: _PreparedCall, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """One dense call of queries `[N * M, heads, head_dim]` to keys and values `[N, kv_heads, L, head_dim]`.

    Heads that share a KV head are packed with the queries into one row dimension, so that keys are read once per KV
    head. They are not packed in a causal call, or from `UNPACKED_QUERIES` queries per block. Returns the output
    `[N * M, heads, head_dim]` and the log-sum-exp `[N * M, heads]`.
    """
    n, m, kv_heads, causal, mask = len(k), len(q) // len(k), k.shape[1], call.call.causal, call.mask
    total, heads, dim = q.shape
    groups = heads // kv_heads
    if not call.packs:
        out, lse = dense_attention(q.view(n, m, heads, dim).transpose(1, 2), k, v, mask, causal, scale, softcap)
        return out.transpose(1, 2).reshape(total, heads, -1), lse.transpose(1, 2).reshape(total, heads)
    if m == 1:
        out, lse = dense_attention(q.view(n, kv_heads, groups, dim), k, v, mask, False, scale, softcap)
        return out.reshape(n, heads, -1), lse.reshape(n, heads)
    packed = q.view(n, m, kv_heads, groups, dim).transpose(1, 2).reshape(n, kv_heads, m * groups, dim)
    out, lse = dense_attention(packed, k, v, mask, False, scale, softcap)
    out = out.view(n, kv_heads, m, groups, -1).transpose(1, 2).reshape(total, heads, -1)
    return out, lse.view(n, kv_heads, m, groups).transpose(1, 2).reshape(total, heads)


def _merge(outs: list[Tensor], lses: list[Tensor], schedule: Schedule, sinks: Tensor | None, query: Tensor) -> Tensor:
    """Merge partial results by their log-sum-exp (Hydragen, eq. 5); a sink is one more result, whose output is zero."""
    count = len(schedule.merge)
    if count == 1 and sinks is None and schedule.in_order:
        return outs[0] if len(outs) == 1 else torch.cat(outs)
    if count == 2 and sinks is None and schedule.in_order and [len(out) for out in outs] == [len(query)] * 2:
        weight = torch.sigmoid(lses[1] - lses[0])[..., None]
        return torch.lerp(outs[0].to(weight.dtype), outs[1].to(weight.dtype), weight).to(query.dtype)
    out, lse = torch.cat(outs), torch.cat(lses)
    if schedule.in_order:
        out, lse = out.unflatten(0, (count, -1)), lse.unflatten(0, (count, -1))
    else:
        index, missing = schedule.merge_index(query.device)
        out, lse = out[index], lse[index]
        if missing is not None:
            lse = lse.masked_fill(missing, float("-inf"))
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype).expand(1, *lse.shape[1:])))
    weights = lse.softmax(dim=0)[:count, ..., None]
    return (out.to(weights.dtype) * weights).sum(dim=0).to(query.dtype)


def append(layer: LayerStorage, new_keys: Tensor, new_values: Tensor, plan: AttentionPlan) -> None:
    """Store packed new keys and values; shapes as in `hf_parallel.kernels.dispatch.append`."""
    device, num_kv_heads = layer.keys.device, layer.num_kv_heads
    if len(plan.write_query) != plan.num_queries:
        stored = plan.cached(("stored", device), lambda: torch.from_numpy(plan.write_query).to(device))
        new_keys, new_values = new_keys.index_select(1, stored), new_values.index_select(1, stored)
    view = plan.write_view(num_kv_heads)
    for storage, new in ((layer.keys, new_keys), (layer.values, new_values)):
        dim = new.shape[-1]
        if view is not None:
            first, token_stride, head_stride = (rows * dim for rows in view)
            storage.as_strided(new.shape, (head_stride, token_stride, 1), first).copy_(new)
        else:
            storage.index_copy_(0, plan.write_rows(num_kv_heads, device), new.reshape(-1, dim))


def move(
    layer: LayerStorage, source: TokenRange, target: TokenRange, delta: int = 0, rotary: RotarySpec | None = None
) -> None:
    """Copy tokens within a layer's storage; arguments as in `hf_parallel.kernels.dispatch.move`."""
    from_rows, to_rows = layer.rows(source).reshape(-1), layer.rows(target).reshape(-1)
    moved = layer.keys[from_rows]
    layer.keys[to_rows] = rotate_by(moved, delta, rotary) if delta and rotary is not None else moved
    layer.values[to_rows] = layer.values[from_rows]
