"""Block attention by Triton: launches of the kernel that computes work items, then of one that merges their results."""

from __future__ import annotations

from torch import Tensor

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.triton.kernels import attend_kernel, merge_heads_kernel, merge_kernel
from hf_parallel.kernels.triton.launch import AttendLaunch, LayerShape, block_size, bucket, launch_for, on_device

PARTS_PER_STEP = 16  # partial results merged at once
MERGED_BY_HEAD = 8192  # results up to which a program merges one head of a query; two waves of programs on a large GPU
_HEADS_PER_MERGE = 8  # by one program otherwise
_NO_WINDOW = 1 << 30

Stored = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys, values, what the keys' leading dimensions are read from, and scales: `[slots * kv_heads, ...]` each."""


def attend(
    query: Tensor,
    stored: Stored,
    plan: AttentionPlan,
    params: AttentionParams,
    shape: LayerShape,
    in_8_bits: Stored | None = None,
) -> Tensor:
    """Return the attention `[tokens, heads, value_dim]` of queries `[tokens, heads, head_dim]`.

    `stored` holds the blocks of the plan, `in_8_bits` those in 8 bits. Queries after the plan's are padding, whose
    output is zero.
    """
    tokens, heads, _ = query.shape
    max_tokens = bucket(tokens)
    launch = launch_for(plan, (shape, max_tokens), lambda: AttendLaunch(plan, shape, max_tokens))
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(tokens, heads, shape.value_dim)
    scalars = (
        shape.num_kv_heads,
        params.scale,
        params.softcap or 0.0,
        shape.window or _NO_WINDOW,
        shape.chunk or 1,
    )
    with on_device(query.device):
        for grid, tensors, constants in launch.calls:
            blocks = in_8_bits if constants["QUANTIZED"] else stored
            assert blocks is not None, "the plan has blocks in 8 bits"
            attend_kernel[grid](
                query, *blocks, *tensors, *query.stride()[:2], *scalars,
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
