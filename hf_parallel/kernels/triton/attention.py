"""Triton backend of block attention: one kernel over equal work items, one that merges their results.

Also launches the kernels that store and move keys and values. The inputs of a pass are prepared once, in a `Launch`,
for all layers of one shape. docs/kernels.md explains the kernels and their constants.
"""

from __future__ import annotations

import torch
from triton import knobs

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.storage import LayerStorage, TokenRange, storage_row
from hf_parallel.kernels.triton.kernels import append_kernel, attend_kernel, merge_kernel, move_kernel
from hf_parallel.kernels.triton.launch import (
    AttendLaunch,
    LayerShape,
    WriteLaunch,
    block_size,
    bucket,
    frequencies,
    launch_for,
    on_device,
)

MAX_DIM = 256
"""Largest head size: with larger heads a tile would not fit into registers."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_WINDOW = 1 << 30
_TOKENS_PER_PROGRAM = 16  # stored or moved
PARTS_PER_STEP = 16  # partial results merged at once


def unsupported_reason(keys: torch.Tensor, values: torch.Tensor) -> str:
    """Return why the kernels do not support a layer's storage; empty if they do."""
    if keys.dtype not in _DTYPES:
        return f"its kernels compute in float16, bfloat16 and float32, not {keys.dtype}"
    if keys.dtype == torch.bfloat16 and knobs.runtime.interpret:
        return "its interpreter multiplies bfloat16 as if it were integers"
    if max(keys.shape[-1], values.shape[-1]) > MAX_DIM:
        return f"its kernels take heads of up to {MAX_DIM}, got {keys.shape[-1]} and {values.shape[-1]}"
    return ""


def block_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, params: AttentionParams
) -> torch.Tensor:
    """Block attention; shapes as in `hf_parallel.kernels.block_attention`.

    Queries after those of the plan are padding, whose output is zero.
    """
    tokens, heads, dim = query.shape
    shape = LayerShape(
        heads // params.num_kv_heads,
        params.num_kv_heads,
        dim,
        values.shape[-1],
        query.dtype,
        query.device,
        params.window,
        params.rotary,
    )
    max_tokens = bucket(tokens)
    launch = launch_for(plan, (shape, max_tokens), lambda: AttendLaunch(plan, shape, max_tokens))
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = query.new_empty(tokens, heads, shape.value_dim)
    with on_device(query.device):
        for call in launch.calls:
            attend_kernel[call.grid](
                query,
                keys,
                values,
                *call.buffers,
                query.stride(0),
                query.stride(1),
                shape.num_kv_heads,
                params.scale,
                params.softcap or 0.0,
                shape.window or _NO_WINDOW,
                SOFTCAP=params.softcap is not None,
                **call.constants,
            )
        merge_kernel[(tokens, heads)](
            launch.part_out,
            launch.part_lse,
            launch.buffers["merge_start"],
            launch.buffers["merge_slot"],
            launch.part_lse if params.sinks is None else params.sinks,
            out,
            heads,
            DIM_V=shape.value_dim,
            BLOCK_V=block_size(shape.value_dim),
            BLOCK_S=PARTS_PER_STEP,
            SINKS=params.sinks is not None,
            num_warps=2,
        )
    return out


def append(layer: LayerStorage, new_keys: torch.Tensor, new_values: torch.Tensor, plan: AttentionPlan) -> None:
    """Store packed new keys and values; shapes as in `hf_parallel.kernels.dispatch.append`.

    Tokens after those of the plan are padding and are not stored.
    """
    device, dim, value_dim = layer.keys.device, layer.keys.shape[-1], layer.values.shape[-1]
    buffers = launch_for(plan, ("writes", device), lambda: WriteLaunch(plan, device)).buffers
    new_keys, new_values = (new if new.stride(-1) == 1 else new.contiguous() for new in (new_keys, new_values))
    with on_device(device):
        append_kernel[(-(-len(buffers["query"]) // _TOKENS_PER_PROGRAM), layer.num_kv_heads)](
            new_keys,
            new_values,
            layer.keys,
            layer.values,
            buffers["query"],
            buffers["origin"],
            buffers["capacity"],
            buffers["index"],
            buffers["count"],
            buffers["step"],
            layer.num_kv_heads,
            new_keys.stride(0),
            new_keys.stride(1),
            new_values.stride(0),
            new_values.stride(1),
            DIM=dim,
            DIM_V=value_dim,
            BLOCK_D=block_size(dim),
            BLOCK_V=block_size(value_dim),
            BLOCK_T=_TOKENS_PER_PROGRAM,
        )


def move(
    layer: LayerStorage, source: TokenRange, target: TokenRange, delta: int = 0, rotary: RotarySpec | None = None
) -> None:
    """Copy tokens within a layer's storage; arguments as in `hf_parallel.kernels.dispatch.move`."""
    if not source.length:
        return
    keys, values, num_kv_heads = layer.keys, layer.values, layer.num_kv_heads
    rotary = rotary if delta else None
    dim, value_dim = keys.shape[-1], values.shape[-1]
    with on_device(keys.device):
        move_kernel[(-(-source.length // _TOKENS_PER_PROGRAM), num_kv_heads)](
            keys,
            values,
            keys if rotary is None else frequencies(rotary, keys.device),
            storage_row(source.origin, source.capacity, source.start, num_kv_heads),
            source.capacity,
            storage_row(target.origin, target.capacity, target.start, num_kv_heads),
            target.capacity,
            source.length,
            delta,
            DIM=dim,
            DIM_V=value_dim,
            BLOCK_D=block_size(dim),
            BLOCK_V=block_size(value_dim),
            BLOCK_T=_TOKENS_PER_PROGRAM,
            HALF=0 if rotary is None else len(rotary.inv_freq),
            INTERLEAVED=rotary is not None and rotary.interleaved,
        )
