"""Triton kernel of attention by parts: a row's result has the same bits in every schedule; `parts.py` launches it.

A part is `PART` keys at fixed positions of a row. Tiles of its keys, also at fixed positions, are added in one order. A
tile that a row does not see does not change the row's sums: it adds weights of zero, and multiplies by one.
"""

# Arguments without annotation are pointers and scalars: Triton reads annotations itself.
# mypy: ignore-errors

import triton
import triton.language as tl

from hf_parallel.kernels.triton.kernels import FAR, LOG2E, _rotated_query, _storage_row, weigh_tile


@triton.jit
def _load_rows(storage, row, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `[BLOCK_N]` of a storage, `[BLOCK_N, BLOCK_D]`; zeros where they are not `inside`."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(storage + row[:, None] * DIM + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rotated"])
def attend_part_kernel(
    query,  # [T, heads, LEAD + DIM], contiguous
    keys,  # [slots * kv_heads, DIM]
    values,  # [slots * kv_heads, DIM_V]; not read if there are leads
    leads,  # [slots, LEAD], the first dimensions of the keys; with them, there is one KV head
    items,  # int32 [W, 8], see parts.ITEM_FIELDS
    gathered,  # int32 [G, 3], origin, capacity and index of keys of earlier blocks
    pair_query,  # int32 [P]
    pair_lo,  # int32 [P], visible keys, counted from the start of the part in which the block begins
    pair_hi,  # int32 [P]
    pair_slot,  # int32 [P], slot of the result of part 0, if the pair has one
    cos,  # float32 [P, HALF]
    sin,  # float32 [P, HALF]
    part_out,  # float32 [S, heads, DIM_V]
    part_lse,  # float32 [S, heads]
    num_kv_heads, rotated, scale, softcap,
    GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, LEAD: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PART: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of the rows of an item to one part of their keys, for one KV head.

    Rows are (pair, head of the group), `GROUP_TILE` heads of a group at a time, as in `attend_kernel`.
    """
    HEAD_TILES: tl.constexpr = (GROUPS + GROUP_TILE - 1) // GROUP_TILE
    item = items + tl.program_id(0) * 8
    origin = tl.load(item)
    capacity = tl.load(item + 1)
    block_first = tl.load(item + 2)
    before = tl.load(item + 3)
    first_gathered = tl.load(item + 4)
    part = tl.load(item + 5)
    first_pair = tl.load(item + 6)
    num_pairs = tl.load(item + 7)
    kv_head = tl.program_id(1) // HEAD_TILES
    m = tl.arange(0, BLOCK_M)
    d_v = tl.arange(0, BLOCK_V)
    in_group = (tl.program_id(1) % HEAD_TILES) * GROUP_TILE + m % GROUP_TILE
    head = kv_head * GROUPS + in_group
    num_heads = num_kv_heads * GROUPS

    live = (m < num_pairs * GROUP_TILE) & (in_group < GROUPS)
    pair = first_pair + m // GROUP_TILE
    lo = tl.load(pair_lo + pair, mask=live, other=0)
    hi = tl.load(pair_hi + pair, mask=live, other=0)
    token = tl.load(pair_query + pair, mask=live, other=0).to(tl.int64)
    q_at = query + ((token * num_heads + head) * (LEAD + DIM))[:, None]
    if LEAD > 0:
        q = _rotated_query(q_at + LEAD, live[:, None], pair, rotated, cos, sin, DIM, BLOCK_M, BLOCK_D, 0, False)
        q_lead = _rotated_query(q_at, live[:, None], pair, rotated, cos, sin, LEAD, BLOCK_M, BLOCK_L, HALF, INTERLEAVED)
    else:
        q = _rotated_query(q_at, live[:, None], pair, rotated, cos, sin, DIM, BLOCK_M, BLOCK_D, HALF, INTERLEAVED)
        q_lead = q

    begin = tl.maximum(part * PART, tl.min(tl.where(live, lo, FAR), 0)) // BLOCK_N  # tiles
    end = tl.minimum(part * PART + PART, tl.max(hi, 0))  # keys
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_V], 0.0, tl.float32)
    for tile in range(begin, (end + BLOCK_N - 1) // BLOCK_N):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < end
        is_gathered = inside & (n < before)
        at = gathered + (first_gathered + n) * 3
        key_origin = tl.load(at, mask=is_gathered, other=origin).to(tl.int64)
        key_capacity = tl.load(at + 1, mask=is_gathered, other=capacity).to(tl.int64)
        earlier_index = tl.load(at + 2, mask=is_gathered, other=0)
        index = tl.where(is_gathered, earlier_index, block_first + n - before)
        row = _storage_row(key_origin, key_capacity, index, num_kv_heads, kv_head)
        k = _load_rows(keys, row, inside, DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if LEAD > 0:
            lead = _load_rows(leads, row, inside, LEAD, BLOCK_L)
            scores = tl.dot(q_lead, tl.trans(lead), scores, input_precision=PRECISION)
            v = k
        else:
            v = _load_rows(values, row, inside, DIM_V, BLOCK_V)
        weights, decay, best, total = weigh_tile(
            scores, n, end, lo, hi, best, total, scale, softcap, True, SOFTCAP
        )  # fmt: skip
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    has_result = live & (tl.maximum(lo, part * PART) < tl.minimum(hi, part * PART + PART))
    safe = tl.where(has_result, total, 1.0)
    lse = (best + tl.log2(safe)) / LOG2E
    slot = tl.load(pair_slot + pair, mask=live, other=0) + part
    result = slot.to(tl.int64) * num_heads + head
    mask = has_result[:, None] & (d_v < DIM_V)[None, :]
    tl.store(part_out + result[:, None] * DIM_V + d_v[None, :], acc / safe[:, None], mask=mask)
    tl.store(part_lse + result, lse, mask=has_result)
