"""Block attention in Triton: one kernel over equal shares of keys, one that merges their results.

Also the kernels that store and move keys and values. What a pass needs is prepared once, in a `Launch`, for all layers
of one shape; docs/kernels.md explains the kernels and their numbers.
"""

from __future__ import annotations

import torch
from triton import knobs

from hf_parallel.kernels.plan import AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.triton.kernels import append_kernel, attend_kernel, merge_kernel, move_kernel
from hf_parallel.kernels.triton.launch import (
    AttendLaunch,
    LayerShape,
    Tiling,
    WriteLaunch,
    block_size,
    bucket,
    frequencies,
    launch_for,
    on_device,
)
from hf_parallel.kernels.work import Place

MAX_DIM = 256
"""Largest head size: beyond it a tile leaves no registers."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_WINDOW = 1 << 30
_TOKENS_AT_ONCE = 16  # that one program stores or moves
_PARTS_AT_ONCE = 16  # that one program merges in one go


def why_not(keys: torch.Tensor, values: torch.Tensor) -> str:
    """Why the kernels do not serve a layer's storage; empty if they do."""
    if keys.dtype not in _DTYPES:
        return f"its kernels compute in float16, bfloat16 and float32, not {keys.dtype}"
    if keys.dtype == torch.bfloat16 and knobs.runtime.interpret:
        return "its interpreter multiplies bfloat16 as if it were integers"
    if max(keys.shape[-1], values.shape[-1]) > MAX_DIM:
        return f"its kernels take heads of up to {MAX_DIM}, got {keys.shape[-1]} and {values.shape[-1]}"
    return ""


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
    """Block attention; shapes as in `hf_parallel.kernels.block_attention`.

    There may be more queries than the plan has: those behind its own get zeros.
    """
    tokens, heads, dim = query.shape
    shape = LayerShape(
        heads // num_kv_heads, num_kv_heads, dim, values.shape[-1], query.dtype, query.device, window, rotary
    )
    room = bucket(tokens)
    launch = launch_for(plan, (shape, room), lambda: AttendLaunch(plan, shape, room))
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = query.new_empty(tokens, heads, shape.value_dim)
    with on_device(query.device):
        for number, (tiling, lines) in enumerate(zip(launch.tilings, launch.lines, strict=True)):
            _attend(query, keys, values, launch, tiling, launch.buffers[f"lines {number}"], lines, scale, softcap)
        merge_kernel[(tokens, heads)](
            launch.part_out,
            launch.part_lse,
            launch.buffers["merge_start"],
            launch.buffers["merge_slot"],
            launch.part_lse if sinks is None else sinks,
            out,
            heads,
            DIM_V=shape.value_dim,
            BLOCK_V=block_size(shape.value_dim),
            BLOCK_S=_PARTS_AT_ONCE,
            SINKS=sinks is not None,
            num_warps=2,
        )
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    launch: AttendLaunch,
    tiling: Tiling,
    lines: torch.Tensor,
    num_lines: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Partial results of the shares of one tiling."""
    shape, buffers = launch.shape, launch.buffers
    group_tile = tiling.group_tile(shape.groups)
    head_tiles = -(-shape.groups // group_tile)
    attend_kernel[(num_lines * shape.num_kv_heads * head_tiles,)](
        query,
        keys,
        values,
        buffers["items"],
        lines,
        buffers["pair_query"],
        buffers["pair_lo"],
        buffers["pair_hi"],
        buffers["pair_reach"],
        buffers["growth_hi"],
        buffers["growth_reach"],
        launch.cos,
        launch.sin,
        buffers["step"],
        launch.part_out,
        launch.part_lse,
        query.stride(0),
        query.stride(1),
        shape.num_kv_heads,
        scale,
        softcap or 0.0,
        shape.window or _NO_WINDOW,
        GROUPS=shape.groups,
        GROUP_TILE=group_tile,
        DIM=shape.head_dim,
        DIM_V=shape.value_dim,
        BLOCK_D=block_size(shape.head_dim),
        BLOCK_V=block_size(shape.value_dim),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        HALF=0 if shape.rotary is None else len(shape.rotary.inv_freq),
        INTERLEAVED=shape.rotary is not None and shape.rotary.interleaved,
        SOFTCAP=softcap is not None,
        PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def append(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    num_kv_heads: int,
) -> None:
    """Store packed new keys and values; shapes as in `hf_parallel.kernels.dispatch.append`.

    There may be more tokens than the plan has: those behind its own are not stored.
    """
    device, dim, value_dim = keys.device, keys.shape[-1], values.shape[-1]
    launch = launch_for(plan, ("writes", device), lambda: WriteLaunch(plan, device))
    buffers = launch.buffers
    new_keys, new_values = (new if new.stride(-1) == 1 else new.contiguous() for new in (new_keys, new_values))
    with on_device(device):
        append_kernel[(-(-len(buffers["query"]) // _TOKENS_AT_ONCE), num_kv_heads)](
            new_keys,
            new_values,
            keys,
            values,
            buffers["query"],
            buffers["origin"],
            buffers["capacity"],
            buffers["index"],
            buffers["count"],
            buffers["step"],
            num_kv_heads,
            new_keys.stride(0),
            new_keys.stride(1),
            new_values.stride(0),
            new_values.stride(1),
            DIM=dim,
            DIM_V=value_dim,
            BLOCK_D=block_size(dim),
            BLOCK_V=block_size(value_dim),
            BLOCK_T=_TOKENS_AT_ONCE,
        )


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
    if not length:
        return
    turn = rotary if delta else None
    dim, value_dim = keys.shape[-1], values.shape[-1]
    with on_device(keys.device):
        move_kernel[(-(-length // _TOKENS_AT_ONCE), num_kv_heads)](
            keys,
            values,
            keys if turn is None else frequencies(turn, keys.device),
            source.origin * num_kv_heads + source.first,
            source.capacity,
            target.origin * num_kv_heads + target.first,
            target.capacity,
            length,
            delta,
            DIM=dim,
            DIM_V=value_dim,
            BLOCK_D=block_size(dim),
            BLOCK_V=block_size(value_dim),
            BLOCK_T=_TOKENS_AT_ONCE,
            HALF=0 if turn is None else len(turn.inv_freq),
            INTERLEAVED=turn is not None and turn.interleaved,
        )
