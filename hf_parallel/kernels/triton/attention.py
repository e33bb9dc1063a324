"""Triton backend of block attention: a kernel that computes work items, and kernels that merge them.

Also launches the kernels that store and move keys and values. The inputs of a pass are prepared once, in a `Launch`,
for all layers of one shape. docs/kernels.md explains the kernels and their constants.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.storage import QuantizedStorage, TokenRange, storage_row
from hf_parallel.kernels.torch_attention import TorchBackend
from hf_parallel.kernels.triton.attend import attend
from hf_parallel.kernels.triton.invariant.parts import attend_parts
from hf_parallel.kernels.triton.launch import (
    LayerShape,
    WriteLaunch,
    dim_constants,
    frequencies,
    launch_for,
    on_device,
)
from hf_parallel.kernels.triton.storage_kernels import append_kernel, move_kernel

MAX_RUN = 64  # new tokens of a row above which FlashAttention (torch backend) is faster
MAX_DIM = 512  # with larger heads a tile would not fit into registers
_TOKENS_PER_PROGRAM = 16  # stored or moved


def unsupported_reason(keys: Tensor, values: Tensor) -> str:
    """Return why the kernels do not support a layer's storage; empty if they do."""
    if keys.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"Triton kernels support float16, bfloat16 and float32, got {keys.dtype}"
    if keys.dtype == torch.bfloat16 and knobs.runtime.interpret:
        return "Triton's interpreter multiplies bfloat16 as integers"
    sizes = keys.shape[-1], values.shape[-1]
    limit = MAX_DIM
    if keys.dtype == torch.float32 and min(sizes) > MAX_DIM // 2:
        limit = MAX_DIM // 2  # else it spills
    if max(sizes) > limit:
        return f"Triton kernels support head sizes of up to {limit} in {keys.dtype}, got {sizes[0]} and {sizes[1]}"
    return ""


class TritonBackend(TorchBackend):
    """Block attention on a GPU. `is_chosen`: it also serves passes with a run of more than `MAX_RUN` new tokens."""

    capturable = True

    def __init__(self, is_chosen: bool = True) -> None:
        self.is_chosen = is_chosen

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        params: AttentionParams,
        quantized: QuantizedStorage | None = None,
    ) -> Tensor:
        """Queries after the plan's are padding, whose output is zero."""
        if params.batch_invariant and quantized is not None:
            raise ValueError("cache_dtype must be None for a model with batch_invariant=True on a GPU")
        # FlashAttention, which has no soft-capping, computes long runs of new tokens faster.
        is_fused = params.softcap is None and (keys.shape == values.shape or params.latent is not None)
        is_dense = not self.is_chosen and is_fused and plan.longest_run > MAX_RUN
        if is_dense and not params.batch_invariant:
            return super().attend(query, keys, values, plan, params, quantized)
        latent = params.latent
        leads = keys
        lead = 0
        if latent is not None:
            query = latent.absorb(query)
            lead = values.shape[-1]
            leads = values
            values = keys
        stored = keys, values, leads, keys
        in_8_bits = None
        if quantized is not None:
            in_8_bits = quantized.keys, quantized.values, quantized.values, quantized.scales
        _, heads, dim = query.shape
        shape = LayerShape(
            groups=heads // params.num_kv_heads,
            num_kv_heads=params.num_kv_heads,
            head_dim=dim - lead,
            value_dim=values.shape[-1],
            dtype=query.dtype,
            device=query.device,
            window=params.window,
            rotary=params.rotary,
            lead=lead,
            chunk=params.chunk,
        )
        if params.batch_invariant:
            sums = attend_parts(query, keys, values, leads, plan, params, shape)
            return sums if latent is None else latent.project(sums)
        out = attend(query, stored, plan, params, shape, in_8_bits)
        return out if latent is None else latent.project(out)

    def append(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, plan: AttentionPlan) -> None:
        """Tokens after the plan's are padding, not stored."""
        device = keys.device
        num_kv_heads = new_keys.shape[0]
        buffers = launch_for(plan, ("writes", device), lambda: WriteLaunch(plan, device)).buffers
        writes = [buffers[name] for name in ("query", "origin", "capacity", "index", "count", "step")]
        if new_keys.stride(-1) != 1:
            new_keys = new_keys.contiguous()
        if new_values.stride(-1) != 1:
            new_values = new_values.contiguous()
        num_programs = -(-len(buffers["query"]) // _TOKENS_PER_PROGRAM)
        with on_device(device):
            append_kernel[(num_programs, num_kv_heads)](
                new_keys, new_values, keys, values, *writes,
                num_kv_heads, *new_keys.stride()[:2], *new_values.stride()[:2],
                **dim_constants(keys.shape[-1], values.shape[-1]), BLOCK_T=_TOKENS_PER_PROGRAM,
            )  # fmt: skip

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
        if not source.length:
            return
        rotary = rotary if delta else None
        half, interleaved = (0, False) if rotary is None else (len(rotary.inv_freq), rotary.interleaved)
        with on_device(keys.device):
            move_kernel[(-(-source.length // _TOKENS_PER_PROGRAM), num_kv_heads)](
                keys, values, keys if rotary is None else frequencies(rotary, keys.device),
                storage_row(source.origin, source.capacity, source.start, num_kv_heads), source.capacity,
                storage_row(target.origin, target.capacity, target.start, num_kv_heads), target.capacity,
                source.length, delta, **dim_constants(keys.shape[-1], values.shape[-1]), BLOCK_T=_TOKENS_PER_PROGRAM,
                HALF=half, INTERLEAVED=interleaved,
            )  # fmt: skip
