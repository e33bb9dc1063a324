"""Triton backend of block attention: one kernel that computes work items, one that merges their results.

Also launches the kernels that store and move keys and values. The inputs of a pass are prepared once, in a `Launch`,
for all layers of one shape. docs/kernels.md explains the kernels and their constants.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.storage import LayerStorage, TokenRange, storage_row
from hf_parallel.kernels.triton.kernels import (
    append_kernel,
    attend_kernel,
    merge_heads_kernel,
    merge_kernel,
    move_kernel,
)
from hf_parallel.kernels.triton.launch import (
    AttendLaunch,
    LayerShape,
    WriteLaunch,
    block_size,
    bucket,
    dim_constants,
    frequencies,
    launch_for,
    on_device,
)

MAX_DIM = 256  # with larger heads a tile would not fit into registers
_NO_WINDOW = 1 << 30
_TOKENS_PER_PROGRAM = 16  # stored or moved
PARTS_PER_STEP = 16  # partial results merged at once
MERGED_BY_HEAD = 8192  # results up to which a program merges one head of a query; two waves of programs on a large GPU
_HEADS_PER_MERGE = 8  # by one program otherwise


def unsupported_reason(keys: Tensor, values: Tensor) -> str:
    """Return why the kernels do not support a layer's storage; empty if they do."""
    if keys.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"Triton kernels support float16, bfloat16 and float32, got {keys.dtype}"
    if keys.dtype == torch.bfloat16 and knobs.runtime.interpret:
        return "Triton's interpreter multiplies bfloat16 as integers"
    if max(keys.shape[-1], values.shape[-1]) > MAX_DIM:
        return f"Triton kernels support head sizes of up to {MAX_DIM}, got {keys.shape[-1]} and {values.shape[-1]}"
    return ""


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, params: AttentionParams
) -> Tensor:
    """Block attention, as in `hf_parallel.kernels`. Queries after the plan's are padding, whose output is zero."""
    tokens, heads, dim = query.shape
    sizes = heads // params.num_kv_heads, params.num_kv_heads, dim, values.shape[-1]
    shape = LayerShape(*sizes, query.dtype, query.device, params.window, params.rotary)
    max_tokens = bucket(tokens)
    launch = launch_for(plan, (shape, max_tokens), lambda: AttendLaunch(plan, shape, max_tokens))
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = query.new_empty(tokens, heads, shape.value_dim)
    scalars = shape.num_kv_heads, params.scale, params.softcap or 0.0, shape.window or _NO_WINDOW
    with on_device(query.device):
        for grid, tensors, constants in launch.calls:
            attend_kernel[grid](
                query, keys, values, *tensors, *query.stride()[:2], *scalars,
                SOFTCAP=params.softcap is not None, **constants,
            )  # fmt: skip
        partial = launch.part_out, launch.part_lse, launch.buffers["merge_start"], launch.buffers["merge_slot"]
        sinks = launch.part_lse if params.sinks is None else params.sinks
        constants = {
            "DIM_V": shape.value_dim,
            "BLOCK_V": block_size(shape.value_dim),
            "SINKS": params.sinks is not None,
        }
        if tokens * heads <= MERGED_BY_HEAD:
            merge_kernel[(tokens, heads)](*partial, sinks, out, heads, **constants, BLOCK_S=PARTS_PER_STEP, num_warps=2)
        else:
            merge_heads_kernel[(tokens, -(-heads // _HEADS_PER_MERGE))](
                *partial, sinks, out, heads, **constants, BLOCK_H=_HEADS_PER_MERGE, num_warps=4
            )
    return out


def append(layer: LayerStorage, new_keys: Tensor, new_values: Tensor, plan: AttentionPlan) -> None:
    """Store packed new keys and values, as in `dispatch.append`. Tokens after the plan's are padding, not stored."""
    device = layer.keys.device
    buffers = launch_for(plan, ("writes", device), lambda: WriteLaunch(plan, device)).buffers
    writes = (buffers[name] for name in ("query", "origin", "capacity", "index", "count", "step"))
    new_keys, new_values = (new if new.stride(-1) == 1 else new.contiguous() for new in (new_keys, new_values))
    with on_device(device):
        append_kernel[(-(-len(buffers["query"]) // _TOKENS_PER_PROGRAM), layer.num_kv_heads)](
            new_keys, new_values, layer.keys, layer.values, *writes,
            layer.num_kv_heads, *new_keys.stride()[:2], *new_values.stride()[:2],
            **dim_constants(layer.keys.shape[-1], layer.values.shape[-1]), BLOCK_T=_TOKENS_PER_PROGRAM,
        )  # fmt: skip


def move(
    layer: LayerStorage, source: TokenRange, target: TokenRange, delta: int = 0, rotary: RotarySpec | None = None
) -> None:
    """Copy tokens within a layer's storage; arguments as in `hf_parallel.kernels.dispatch.move`."""
    if not source.length:
        return
    keys, values, num_kv_heads = layer.keys, layer.values, layer.num_kv_heads
    rotary = rotary if delta else None
    with on_device(keys.device):
        move_kernel[(-(-source.length // _TOKENS_PER_PROGRAM), num_kv_heads)](
            keys, values, keys if rotary is None else frequencies(rotary, keys.device),
            storage_row(source.origin, source.capacity, source.start, num_kv_heads), source.capacity,
            storage_row(target.origin, target.capacity, target.start, num_kv_heads), target.capacity,
            source.length, delta, **dim_constants(keys.shape[-1], values.shape[-1]), BLOCK_T=_TOKENS_PER_PROGRAM,
            HALF=0 if rotary is None else len(rotary.inv_freq), INTERLEAVED=rotary is not None and rotary.interleaved,
        )  # fmt: skip
