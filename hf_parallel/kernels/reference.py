"""The dense oracle: every query's keys and values spelled out, one query at a time.

Slow on purpose and written without any of the tricks of the other backends: keys are turned instead of queries,
blocks are concatenated instead of merged. What it says is right by definition.
"""

from __future__ import annotations

import torch

from hf_parallel.kernels.plan import AttentionPlan
from hf_parallel.kernels.rope import RotarySpec, rotate


def block_rows(plan: AttentionPlan, block: int, num_kv_heads: int, lo: int, hi: int) -> torch.Tensor:
    """Storage rows of keys `lo <= j < hi` of a block: int64 `[kv_heads, hi - lo]`."""
    base = int(plan.block_origin[block]) * num_kv_heads + int(plan.block_first[block])
    heads = torch.arange(num_kv_heads)[:, None] * int(plan.block_capacity[block])
    return base + heads + torch.arange(lo, hi)


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
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Block attention by definition; shapes as in `hf_parallel.kernels.block_attention`, computed in `dtype`."""
    plan = plan.windowed(window)
    num_tokens, num_heads, _ = query.shape
    groups = num_heads // num_kv_heads
    q, k_all, v_all = query.to(dtype), keys.to(dtype), values.to(dtype)
    out = torch.empty(num_tokens, num_heads, values.shape[-1], dtype=dtype, device=query.device)
    blocks_of_pairs = [b for b in range(plan.num_blocks) for _ in range(plan.block_pairs[b], plan.block_pairs[b + 1])]
    for token in range(num_tokens):
        seen_keys, seen_values = [], []
        for pair, block in enumerate(blocks_of_pairs):
            if plan.pair_query[pair] != token or plan.pair_lo[pair] >= plan.pair_hi[pair]:
                continue
            rows = block_rows(plan, block, num_kv_heads, int(plan.pair_lo[pair]), int(plan.pair_hi[pair]))
            k = k_all[rows.to(keys.device)]  # [kv_heads, n, head_dim]
            if rotary is not None and plan.pair_delta[pair]:
                cos, sin = rotary.tables(-plan.pair_delta[pair : pair + 1], dtype, query.device)
                k = rotate(k, cos, sin, rotary)
            seen_keys.append(k)
            seen_values.append(v_all[rows.to(values.device)])
        k = torch.cat(seen_keys, dim=1).repeat_interleave(groups, dim=0)
        v = torch.cat(seen_values, dim=1).repeat_interleave(groups, dim=0)
        scores = torch.einsum("hd,hnd->hn", q[token], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype)[:, None]), dim=-1)
        weights = scores.softmax(dim=-1)[:, : k.shape[1]]
        out[token] = torch.einsum("hn,hnd->hd", weights, v)
    return out.to(query.dtype)
