"""Block attention by definition: the oracle of all backends.

Computes one query at a time over its concatenated, re-rotated keys. Slow on purpose: it rotates keys instead of
queries and concatenates blocks instead of merging partial results.
"""

from __future__ import annotations

import torch

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.rope import rotate_by
from hf_parallel.kernels.storage import FIRST_QUANTIZED, QuantizedStorage, TokenRange


def exact_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    params: AttentionParams,
    quantized: QuantizedStorage | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return what `hf_parallel.kernels.block_attention` computes, in `dtype`."""
    plan = plan.windowed(params.window, params.chunk)
    num_tokens, num_heads, _ = query.shape
    q, k_all, v_all = query.to(dtype), keys.to(dtype), values.to(dtype)
    heads, value_dim = params.latent, values.shape[-1]
    if heads is not None:
        heads = heads._replace(weight=heads.weight.to(dtype))
        value_dim = heads.values.shape[1]
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=dtype, device=query.device)
    blocks_of_pairs = [b for b in range(plan.num_blocks) for _ in range(plan.block_pairs[b], plan.block_pairs[b + 1])]
    for token in range(num_tokens):
        seen_keys, seen_values = [], []
        for pair, block in enumerate(blocks_of_pairs):
            lo, hi = int(plan.pair_lo[pair]), int(plan.pair_hi[pair])
            if plan.pair_query[pair] != token or lo >= hi:
                continue
            start = int(plan.block_first[block]) + lo
            tokens = TokenRange(int(plan.block_origin[block]), int(plan.block_capacity[block]), start, hi - lo)
            rows = tokens.rows(params.num_kv_heads, keys.device)
            if quantized is not None and tokens.origin >= FIRST_QUANTIZED:
                k, v = quantized.read(rows, dtype)
            else:
                k, v = k_all[rows], v_all[rows]  # [kv_heads, n, head_dim]
            if heads is not None:
                k, v = (part[0] for part in heads.expand(k[None], v[None]))
            if params.rotary is not None and plan.pair_delta[pair]:
                k = rotate_by(k, -int(plan.pair_delta[pair]), params.rotary)
            seen_keys.append(k)
            seen_values.append(v)
        k, v = (torch.cat(seen, dim=1) for seen in (seen_keys, seen_values))
        k, v = (x.repeat_interleave(num_heads // len(x), dim=0) for x in (k, v))
        scores = torch.einsum("hd,hnd->hn", q[token], k) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        if params.sinks is not None:
            scores = torch.cat((scores, params.sinks.to(dtype)[:, None]), dim=-1)
        weights = scores.softmax(dim=-1)[:, : k.shape[1]]
        out[token] = torch.einsum("hn,hnd->hd", weights, v)
    return out.to(query.dtype)
