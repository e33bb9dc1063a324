"""Triton kernels that store and move keys and values (`attention.py` launches them)."""

# Arguments without annotation are pointers and scalars: Triton reads annotations itself.
# mypy: ignore-errors

import triton
import triton.language as tl

from hf_parallel.kernels.triton.kernels import _partners, _storage_row


@triton.jit
def append_kernel(
    new_keys,  # [kv_heads, T, DIM]
    new_values,  # [kv_heads, T, DIM_V]
    keys,  # [slots * kv_heads, DIM]
    values,  # [slots * kv_heads, DIM_V]
    write_query,  # int32 [W]
    write_origin,  # int32 [W]
    write_capacity,  # int32 [W]
    write_index,  # int32 [W]
    count,  # int32 [1]: number of tokens W
    step,  # int32 [1]
    num_kv_heads, key_stride_head, key_stride_token, value_stride_head, value_stride_token,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store packed new keys and values in their extents; each is read and written once."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_V)
    live = t < tl.load(count)
    token = tl.load(write_query + t, mask=live, other=0).to(tl.int64)
    origin = tl.load(write_origin + t, mask=live, other=0).to(tl.int64)
    capacity = tl.load(write_capacity + t, mask=live, other=0)
    index = tl.load(write_index + t, mask=live, other=0)
    row = _storage_row(origin, capacity, index, num_kv_heads, head) + tl.load(step)
    inside = live[:, None] & (d < DIM)[None, :]
    k = tl.load(new_keys + head * key_stride_head + token[:, None] * key_stride_token + d[None, :], mask=inside)
    tl.store(keys + row[:, None] * DIM + d[None, :], k, mask=inside)
    inside = live[:, None] & (d_v < DIM_V)[None, :]
    v = tl.load(new_values + head * value_stride_head + token[:, None] * value_stride_token + d_v[None, :], mask=inside)
    tl.store(values + row[:, None] * DIM_V + d_v[None, :], v, mask=inside)


@triton.jit(do_not_specialize=["source", "source_capacity", "target", "target_capacity", "num_tokens", "delta"])
def move_kernel(
    keys,  # [slots * kv_heads, DIM]
    values,  # [slots * kv_heads, DIM_V]
    inv_freq,  # float64 [HALF]
    source,  # row of the first token of head 0
    source_capacity, target, target_capacity, num_tokens, delta,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Copy tokens to another extent and rotate their keys by `delta`; each is read and written once.

    Source and target must not overlap.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_V)
    live = t < num_tokens
    from_row = source + head * source_capacity + t
    to_row = target + head * target_capacity + t
    inside = live[:, None] & (d < DIM)[None, :]
    k_at = keys + from_row[:, None] * DIM
    k = tl.load(k_at + d[None, :], mask=inside)
    if HALF > 0:
        partner, frequency, sign = _partners(d, HALF, INTERLEAVED)
        mask = d < 2 * HALF
        angle = tl.load(inv_freq + frequency, mask=mask, other=0.0) * delta
        c = tl.cos(angle).to(tl.float32)
        s = tl.sin(angle).to(tl.float32) * sign
        other = tl.load(k_at + partner[None, :], mask=inside & mask[None, :], other=0.0).to(tl.float32)
        k = (k.to(tl.float32) * c[None, :] + other * s[None, :]).to(k.dtype)
    tl.store(keys + to_row[:, None] * DIM + d[None, :], k, mask=inside)
    inside = live[:, None] & (d_v < DIM_V)[None, :]
    v = tl.load(values + from_row[:, None] * DIM_V + d_v[None, :], mask=inside)
    tl.store(values + to_row[:, None] * DIM_V + d_v[None, :], v, mask=inside)
