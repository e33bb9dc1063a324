"""Block attention with PyTorch's own kernels, on any device.

Each call of the schedule runs the SDPA primitive of its device that also returns the log-sum-exp; partial results
are merged exactly (Hydragen, eq. 5). Where no primitive serves (soft-capping, other devices) the call is spelled out.
On a GPU, FlashAttention serves what needs no mask, that of the flash-attn package where it is installed. On a CPU,
decode steps and short appends are left to `native.py`, which reads each block once for all heads and rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from hf_parallel.kernels import native
from hf_parallel.kernels.plan import AttentionPlan
from hf_parallel.kernels.rope import RotarySpec, rotate
from hf_parallel.kernels.schedule import MERGE_INDEX, Call, Schedule, make_schedule
from hf_parallel.kernels.work import Place

UNPACKED_QUERIES = 32
"""Queries per block from which packing grouped heads gains nothing over one product per head."""

NATIVE_RUN = 32
"""Queries of a block up to which the compiled kernel hides keys from some of them."""

MASK_ALIGNMENT = 16
"""Elements at whose multiples rows of a mask begin: PyTorch's memory-efficient attention refuses others on a GPU."""

_FLASH_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_EFFICIENT_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLASH_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_CUDA_DIM = 256
_FLASH_CUDA_CAPABILITY = (8, 0)


@dataclass(frozen=True, eq=False)
class _Bound:
    """A call of the schedule bound to a layer's dimensions: all that can be known before its tensors are."""

    take: slice | torch.Tensor | None
    tables: tuple[torch.Tensor, torch.Tensor] | None
    mask: torch.Tensor | None
    causal: bool
    packs: bool
    num_blocks: int
    num_queries: int
    key_view: tuple[tuple[int, ...], tuple[int, ...], int]
    value_view: tuple[tuple[int, ...], tuple[int, ...], int]


def block_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_kv_heads: int,
    scale: float,
    rotary: RotarySpec | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Block attention; shapes as in `hf_parallel.kernels.block_attention`."""
    plan = plan.windowed(window)
    schedule = plan.memo("schedule", lambda: make_schedule(plan))
    turn = rotary if plan.rotates else None
    shape = (query.shape[1], num_kv_heads, keys.shape[-1], values.shape[-1])
    bound = (shape, turn, query.dtype, query.device)
    if softcap is None:
        natively = schedule.memo(("native", *bound), lambda: _bind_natively(plan, schedule, shape, turn, query))
        if natively is not None:
            return native.attend(query, keys, values, natively, num_kv_heads, scale, sinks)[0]
    calls = schedule.memo(bound, lambda: [_bind(plan, call, shape, turn, query) for call in schedule.calls])
    outs, lses = [], []
    for call in calls:
        q = query if call.take is None else query[call.take]
        if call.tables is not None and turn is not None:
            q = rotate(q, *call.tables, turn)
        k, v = keys.as_strided(*call.key_view), values.as_strided(*call.value_view)
        out, lse = _attend(q, k, v, call, scale, softcap)
        outs.append(out)
        lses.append(lse)
    return _merge(outs, lses, schedule, sinks, query)


def _bind_natively(
    plan: AttentionPlan,
    schedule: Schedule,
    shape: tuple[int, int, int, int],
    turn: RotarySpec | None,
    query: torch.Tensor,
) -> native.Calls | None:
    """A schedule as the compiled kernel takes it, or None where it does not serve all of it (long runs of a row)."""
    heads, kv_heads, key_dim, value_dim = shape
    for call in schedule.calls:
        rows = call.num_queries * heads // kv_heads
        long = (call.causal or call.lo is not None) and call.num_queries > NATIVE_RUN
        if long or not native.serves(query.dtype, query.device, rows, key_dim, value_dim):
            return None
    return native.Calls([_native_call(plan, call, kv_heads, key_dim, turn) for call in schedule.calls])


def _native_call(
    plan: AttentionPlan, call: Call, kv_heads: int, dim: int, turn: RotarySpec | None
) -> dict[str, int | torch.Tensor]:
    _, (block_stride, head_stride, _, _), offset = _extents(call, kv_heads, dim)
    fields: dict[str, int | torch.Tensor] = {
        "blocks": call.num_blocks,
        "queries": call.num_queries,
        "num_keys": call.num_keys,
    }
    for name in ("key", "value"):
        fields |= {f"{name}_offset": offset, f"{name}_block": block_stride, f"{name}_head": head_stride}
    index = np.where(call.pairs < 0, -1, plan.pair_query[call.pairs])
    if not np.array_equal(index, np.arange(plan.num_queries)):
        fields |= {"take": torch.from_numpy(index), "repeats": int(np.bincount(index[index >= 0]).max() > 1)}
    delta = plan.pair_delta[call.pairs]
    if turn is not None and delta.any():
        cos, sin = turn.tables(delta, torch.float32, torch.device("cpu"))
        fields |= {"cos": cos, "sin": sin, "half": cos.shape[-1], "interleaved": int(turn.interleaved)}
    lo, hi = call.lo, call.hi
    if call.causal:
        lo, hi = np.zeros(call.num_queries, np.int64), np.arange(1, call.num_queries + 1, dtype=np.int64)
    if lo is not None and hi is not None:
        fields |= {"lo": torch.from_numpy(lo.reshape(-1)), "hi": torch.from_numpy(hi.reshape(-1))}
    return fields


def _bind(
    plan: AttentionPlan, call: Call, shape: tuple[int, int, int, int], turn: RotarySpec | None, query: torch.Tensor
) -> _Bound:
    """Make what a call needs in layers of `shape`: heads, KV heads, and the sizes of a key and of a value."""
    heads, kv_heads, key_dim, value_dim = shape
    packed = packs(call.num_queries, call.causal)
    return _Bound(
        take=_take(plan, call, query.device),
        tables=None if turn is None else _tables(plan, call, turn, query),
        mask=_mask(call, heads // kv_heads if packed else 1, query),
        causal=call.causal,
        packs=packed,
        num_blocks=call.num_blocks,
        num_queries=call.num_queries,
        key_view=_extents(call, kv_heads, key_dim),
        value_view=_extents(call, kv_heads, value_dim),
    )


def _take(plan: AttentionPlan, call: Call, device: torch.device) -> slice | torch.Tensor | None:
    """Which packed queries a call meets: None for all of them in order, a slice where they lie together."""
    index = plan.pair_query[call.pairs]
    if (call.pairs >= 0).all() and (np.diff(index) == 1).all():
        start, stop = int(index[0]), int(index[-1]) + 1
        return None if (start, stop) == (0, plan.num_queries) else slice(start, stop)
    return torch.from_numpy(index).to(device)


def _tables(
    plan: AttentionPlan, call: Call, turn: RotarySpec, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines `[N * M, 1, rotary_dim / 2]` of a call's turns, None where nothing turns."""
    delta = plan.pair_delta[call.pairs]
    if not delta.any():
        return None
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    cos, sin = turn.tables(delta, dtype, query.device)
    return cos[:, None], sin[:, None]


def _extents(call: Call, num_kv_heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Size, strides and offset that view a call's keys or values in place: `[N, kv_heads, L, dim]`."""
    return (
        (call.num_blocks, num_kv_heads, call.num_keys, dim),
        (call.spacing * num_kv_heads * dim, call.capacity * dim, dim, 1),
        (call.origin * num_kv_heads + call.first) * dim,
    )


def _mask(call: Call, groups: int, query: torch.Tensor) -> torch.Tensor | None:
    """Additive mask of a call: `[N, 1, M * groups, L]`, or one row where all its queries see the same keys."""
    if call.lo is None or call.hi is None:
        return None
    lo, hi = call.lo, call.hi
    if (lo == lo[:, :1]).all() and (hi == hi[:, :1]).all():
        lo, hi, groups = lo[:, :1], hi[:, :1], 1
    key = torch.arange(-(-call.num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT)
    visible = (key >= torch.from_numpy(lo)[..., None]) & (key < torch.from_numpy(hi)[..., None])  # [N, M, L]
    mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(groups, dim=1)[:, None].to(query.device)[..., : call.num_keys]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Bound, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One dense call.

    Heads that share a KV head are packed with the queries into one row dimension, so that keys are read once per KV
    head; not where that dimension is long enough anyway, nor under a causal mask.

    Parameters
    ----------
    q : [N * M, heads, head_dim]
    k, v : [N, kv_heads, L, head_dim]

    Returns
    -------
    (out, lse) : [N * M, heads, head_dim], [N * M, heads]
    """
    n, m, kv_heads, mask = call.num_blocks, call.num_queries, k.shape[1], call.mask
    total, heads, dim = q.shape
    groups = heads // kv_heads
    if not call.packs:
        out, lse = _primitive(q.view(n, m, heads, dim).transpose(1, 2), k, v, mask, call.causal, scale, softcap)
        return out.transpose(1, 2).reshape(total, heads, -1), lse.transpose(1, 2).reshape(total, heads)
    if m == 1:
        out, lse = _primitive(q.view(n, kv_heads, groups, dim), k, v, mask, False, scale, softcap)
        return out.reshape(n, heads, -1), lse.reshape(n, heads)
    packed = q.view(n, m, kv_heads, groups, dim).transpose(1, 2).reshape(n, kv_heads, m * groups, dim)
    out, lse = _primitive(packed, k, v, mask, False, scale, softcap)
    out = out.view(n, kv_heads, m, groups, -1).transpose(1, 2).reshape(total, heads, -1)
    return out, lse.view(n, kv_heads, m, groups).transpose(1, 2).reshape(total, heads)


def packs(num_queries: int, causal: bool) -> bool:
    """Whether a call packs the heads of a group into its row dimension."""
    return not causal and num_queries < UNPACKED_QUERIES


def _primitive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[N, heads, M, head_dim]` with its log-sum-exp `[N, heads, M]`, by the best primitive of the device."""
    ops = torch.ops.aten
    if softcap is None and q.shape[-1] == v.shape[-1]:
        if q.device.type == "cpu" and q.dtype in _FLASH_CPU_DTYPES:
            return ops._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, dropout_p=0.0, is_causal=causal, attn_mask=mask, scale=scale
            )
        if mask is None and _flash_serves(q):
            return flash(q, k, v, causal, scale)
        if q.device.type == "cuda" and q.dtype in _EFFICIENT_CUDA_DTYPES:
            groups = q.shape[1] // k.shape[1]
            if groups > 1:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            bias = None if mask is None else mask.expand(*q.shape[:3], -1)
            out, lse, *_ = ops._scaled_dot_product_efficient_attention(
                q, k, v, bias, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
            )
            return out, lse[..., : q.shape[2]]
    return _spelled_out(q, k, v, mask, causal, scale, softcap)


def _flash_serves(q: torch.Tensor) -> bool:
    """Whether FlashAttention takes queries of this kind, without a mask."""
    fits = q.dtype in _FLASH_CUDA_DTYPES and q.shape[-1] <= _FLASH_CUDA_DIM and q.shape[-1] % 8 == 0
    return q.is_cuda and fits and torch.cuda.get_device_capability(q.device) >= _FLASH_CUDA_CAPABILITY


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[N, heads, M, head_dim]` and its log-sum-exp by FlashAttention: the package's, or PyTorch's own."""
    function = flash_package()
    if function is None:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, _ = function(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
    return out.transpose(1, 2), lse


@lru_cache
def flash_package() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
    """`flash_attn_func` of the flash-attn package, None where it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def _spelled_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores.float() if scores.dtype != torch.float64 else scores
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return torch.matmul(torch.exp(scores - lse[..., None]).to(v.dtype), v), lse


def _merge(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    schedule: Schedule,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
) -> torch.Tensor:
    """Recombine partial results by their log-sum-exp (Hydragen, eq. 5), a sink being one more empty partial."""
    count = len(schedule.merge)
    if count == 1 and sinks is None and schedule.in_order:
        return outs[0] if len(outs) == 1 else torch.cat(outs)
    if count == 2 and sinks is None and schedule.in_order and [len(out) for out in outs] == [len(query)] * 2:
        share = torch.sigmoid(lses[1] - lses[0])[..., None]
        return torch.lerp(outs[0].to(share.dtype), outs[1].to(share.dtype), share).to(query.dtype)
    out, lse = torch.cat(outs), torch.cat(lses)
    if schedule.in_order:
        out, lse = out.unflatten(0, (count, -1)), lse.unflatten(0, (count, -1))
    else:
        place, absent = schedule.memo((MERGE_INDEX, query.device), lambda: _merge_index(schedule, query.device))
        out, lse = out[place], lse[place]
        if absent is not None:
            lse = lse.masked_fill(absent, float("-inf"))
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype).expand(1, *lse.shape[1:])))
    weights = lse.softmax(dim=0)[:count, ..., None]
    return (out.to(weights.dtype) * weights).sum(dim=0).to(query.dtype)


def _merge_index(schedule: Schedule, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Places `[K, T]` of the partial results and, where some query has fewer than K, which are absent `[K, T, 1]`."""
    place = torch.from_numpy(schedule.merge).to(device)
    absent = place < 0
    return place.clamp(min=0), absent[..., None] if bool(absent.any()) else None


def append(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    num_kv_heads: int,
) -> None:
    """Store packed new keys and values; shapes as in `hf_parallel.kernels.dispatch.append`."""
    if len(plan.write_query) != plan.num_queries:
        kept = plan.memo(("kept", keys.device), lambda: torch.from_numpy(plan.write_query).to(keys.device))
        new_keys, new_values = new_keys.index_select(1, kept), new_values.index_select(1, kept)
    evenly = plan.write_view(num_kv_heads)
    for storage, new in ((keys, new_keys), (values, new_values)):
        dim = new.shape[-1]
        if evenly is not None:
            first, token_stride, head_stride = (rows * dim for rows in evenly)
            storage.as_strided(new.shape, (head_stride, token_stride, 1), first).copy_(new)
        else:
            storage.index_copy_(0, plan.write_rows(num_kv_heads, keys.device), new.reshape(-1, dim))


def move(
    keys: torch.Tensor,
    values: torch.Tensor,
    source: Place,
    target: Place,
    length: int,
    num_kv_heads: int,
    delta: int = 0,
    rotary: RotarySpec | None = None,
) -> None:
    """Copy tokens within a layer's storage, keys turned; arguments as in `hf_parallel.kernels.dispatch.move`."""
    tokens = torch.arange(length, device=keys.device)
    heads = torch.arange(num_kv_heads, device=keys.device)[:, None]
    from_rows, to_rows = (
        (place.origin * num_kv_heads + heads * place.capacity + place.first + tokens).reshape(-1)
        for place in (source, target)
    )
    moved = keys[from_rows]
    if delta and rotary is not None:
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        moved = rotate(moved, *_turn(rotary, delta, dtype, keys.device), rotary)
    keys[to_rows] = moved
    values[to_rows] = values[from_rows]


@lru_cache(maxsize=8)
def _turn(
    rotary: RotarySpec, delta: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[1, rotary_dim / 2]` of one turn, which all layers of a kind make."""
    return rotary.tables(np.array([delta]), dtype, device)
