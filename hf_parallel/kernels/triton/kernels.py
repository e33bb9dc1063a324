"""Triton kernels of block attention; `attention.py` launches them.

All sums are in float32. Offsets into the storage and into partial results are 64-bit, as either may hold more than 2^31
elements; offsets within a block are 32-bit. From one decode step to the next, only the number `step` in device memory
changes: the kernels read it, so that they can be captured in a CUDA graph.
"""

# Arguments without annotation are pointers and scalars: Triton reads annotations itself.
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)
FIRST_QUANTIZED = tl.constexpr(1 << 30)  # `FIRST_QUANTIZED` of `hf_parallel.kernels.storage`


@triton.jit
def _storage_row(origin, capacity, index, num_kv_heads, head):
    """`storage_row` of `hf_parallel.kernels.storage`."""
    return origin * num_kv_heads + head * capacity + index


@triton.jit
def _partners(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each dimension: the other dimension of its rotated pair, the index of its frequency, the sign of its sine."""
    if INTERLEAVED:
        partner = d ^ 1
        frequency = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        frequency = tl.where(d < HALF, d, d - HALF)
        sign = tl.where(d < HALF, -1.0, 1.0)
        if HALF % 8 == 0:  # allows vectorized loads
            partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
            frequency = tl.max_contiguous(tl.multiple_of(frequency, 8), 8)
    return partner, frequency, sign


@triton.jit
def _visible_tiles(start, stop, live, lo, hi, BLOCK_N: tl.constexpr):
    """Keys of an item that some row sees, and the tiles that all rows see completely, which need no mask.

    Returns `(begin, end, num_tiles, first_full, num_full)`: the range of these keys, its number of tiles, the index of
    the first complete tile and the number of complete tiles.
    """
    begin = tl.maximum(start, tl.min(tl.where(live, lo, FAR), 0))
    end = tl.minimum(stop, tl.max(tl.where(live, hi, 0), 0))
    num_tiles = tl.maximum(end - begin + BLOCK_N - 1, 0) // BLOCK_N
    all_lo = tl.max(tl.where(live, lo, 0), 0)
    all_hi = tl.minimum(end, tl.min(tl.where(live, hi, FAR), 0))
    first_full = tl.minimum(num_tiles, tl.maximum(all_lo - begin + BLOCK_N - 1, 0) // BLOCK_N)
    num_full = tl.maximum(all_hi - begin - first_full * BLOCK_N, 0) // BLOCK_N
    return begin, end, num_tiles, first_full, num_full


@triton.jit
def _rotated_query(
    q_at,  # pointers [BLOCK_M, 1]
    load_mask,  # [BLOCK_M, 1]
    pair,  # [BLOCK_M]
    rotated,  # 0 if no row is rotated
    cos, sin,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Queries `[BLOCK_M, BLOCK_D]`, rotated in float32."""
    d = tl.arange(0, BLOCK_D)
    q = tl.load(q_at + d[None, :], mask=load_mask & (d < DIM)[None, :], other=0.0)
    if HALF > 0 and INTERLEAVED:
        h = tl.arange(0, BLOCK_D // 2)
        mask = load_mask & (h < HALF * rotated)[None, :]
        c = tl.load(cos + pair[:, None] * HALF + h[None, :], mask=mask, other=1.0)
        s = tl.load(sin + pair[:, None] * HALF + h[None, :], mask=mask, other=0.0)
        even, odd = tl.split(tl.reshape(q.to(tl.float32), (BLOCK_M, BLOCK_D // 2, 2)))
        rotated_q = tl.join(even * c - odd * s, odd * c + even * s)
        q = tl.reshape(rotated_q, (BLOCK_M, BLOCK_D)).to(q.dtype)
    elif HALF > 0:
        partner, frequency, sign = _partners(d, HALF, False)
        mask = load_mask & (d < 2 * HALF * rotated)[None, :]
        other = tl.load(q_at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        at = pair[:, None] * HALF + frequency[None, :]
        c = tl.load(cos + at, mask=mask, other=1.0)
        s = tl.load(sin + at, mask=mask, other=0.0)
        q = (q.to(tl.float32) * c + other * s * sign[None, :]).to(q.dtype)
    return q


@triton.jit
def _load_tile(rows, n, end, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows `n` of a block's storage, `[BLOCK_N, BLOCK_D]`; zeros from row `end` on, if masked."""
    d = tl.arange(0, BLOCK_D)
    at = rows + n[:, None] * DIM + d[None, :]
    if MASKED:
        tile = tl.load(at, mask=(n < end)[:, None] & (d < DIM)[None, :], other=0.0)
    elif DIM == BLOCK_D:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(d < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def weigh_tile(
    scores,  # [BLOCK_M, BLOCK_N], of keys `n`
    n,  # [BLOCK_N]
    end,  # end of the visible keys
    lo,  # int32 [BLOCK_M]
    hi,  # int32 [BLOCK_M]
    best,  # [BLOCK_M], running maximum of the scores times log2(e)
    total,  # [BLOCK_M], running sum of the weights
    scale, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Turn the scores of a tile into weights (online softmax).

    Returns `(weights, decay, best, total)`: `decay` is the factor of the sums of weighted values before this tile.
    """
    factor = scale * LOG2E  # positive; applied with the subtraction of the maximum, in one instruction per score
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E * scale / softcap))))
        factor = LOG2E
    if MASKED:
        seen = (n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None])
        scores = tl.where(seen & (n < end)[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * factor)
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    else:
        new_best = tl.maximum(best, tl.max(scores, 1) * factor)
        anchor = new_best
    weights = tl.exp2(scores * factor - anchor[:, None])
    decay = tl.exp2(best - anchor)
    return weights, decay, new_best, total * decay + tl.sum(weights, 1)


@triton.jit
def _fold_tile(
    q,  # [BLOCK_M, BLOCK_D]
    q_lead,  # [BLOCK_M, BLOCK_L], if there are leads
    keys,  # pointer to the block's first key
    values,
    leads,
    scales,  # float32 [.., 2], of keys and values (or leads) in 8 bits, if `QUANTIZED`
    first,  # first key of the tile, relative to the block
    end,  # end of the visible keys
    lo,  # int32 [BLOCK_M]
    hi,  # int32 [BLOCK_M]
    best,  # [BLOCK_M], running maximum of the scores times log2(e)
    total,  # [BLOCK_M], running sum of the weights
    acc,  # [BLOCK_M, BLOCK_V], running sum of the weighted values
    scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LEAD: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the running sums (online softmax). With leads, the keys are the values.

    8 bits are exact in half precision, so scales are applied to scores and weights, not to each number.
    """
    n = first + tl.arange(0, BLOCK_N)
    k = _load_tile(keys, n, end, DIM, BLOCK_D, MASKED).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if QUANTIZED:
        scale_k = tl.load(scales + 2 * n, mask=n < end, other=0.0)
        scale_v = tl.load(scales + 2 * n + 1, mask=n < end, other=0.0)
        scores *= scale_k[None, :]
    if LEAD > 0:
        lead = _load_tile(leads, n, end, LEAD, BLOCK_L, MASKED).to(q.dtype)
        if QUANTIZED:
            scores += tl.dot(q_lead, tl.trans(lead), input_precision=PRECISION) * scale_v[None, :]
            scale_v = scale_k
        else:
            scores = tl.dot(q_lead, tl.trans(lead), scores, input_precision=PRECISION)
        v = k
    else:
        v = _load_tile(values, n, end, DIM_V, BLOCK_V, MASKED).to(q.dtype)
    weights, decay, new_best, total = weigh_tile(
        scores, n, end, lo, hi, best, total, scale, softcap, MASKED, SOFTCAP
    )  # fmt: skip
    if QUANTIZED and q.dtype == tl.float16:  # which has no exponents for small weights times scales
        v = (v.to(tl.float32) * scale_v[:, None]).to(tl.float16)
    elif QUANTIZED:
        weights *= scale_v[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_best, total, acc


@triton.jit
def attend_kernel(
    query,  # [T, heads, LEAD + DIM]
    keys,  # [slots * kv_heads, DIM]
    values,  # [slots * kv_heads, DIM_V]; not read if there are leads
    leads,  # [slots, LEAD], the first dimensions of the keys; with them, there is one KV head
    scales,  # float32 [slots * kv_heads, 2], of keys and values (or leads) in 8 bits; not read unless `QUANTIZED`
    items,  # int32 [W, 9], see work.ITEM_FIELDS
    item_offsets,  # int32 [programs + 1]
    pair_query,  # int32 [P]
    pair_lo,  # int32 [P]
    pair_hi,  # int32 [P]
    pair_position,  # int32 [P]
    hi_increment,  # int32 [P]
    position_increment,  # int32 [P]
    block_start,  # int32 [P]; not read without chunks
    start_increment,  # int32 [P]
    cos,  # float32 [P, HALF]
    sin,  # float32 [P, HALF]
    step,  # int32 [1]
    part_out,  # float32 [S, heads, DIM_V]
    part_lse,  # float32 [S, heads]
    query_stride_token, query_stride_head, num_kv_heads, scale, softcap, window, chunk,
    CHUNKED: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, LEAD: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Attention of work items for one KV head: each key and value of an item is read once, for all rows of its tile.

    A program computes its items one after another; the programs have about equal numbers of keys. Rows of a tile are
    (pair, head of the group), `GROUP_TILE` heads of a group at a time. Memory traffic of an item: its keys times
    `DIM + DIM_V` elements of storage, and `BLOCK_M` rows of queries and of partial results.
    """
    HEAD_TILES: tl.constexpr = (GROUPS + GROUP_TILE - 1) // GROUP_TILE
    program = tl.program_id(0) // (num_kv_heads * HEAD_TILES)
    head_tile = tl.program_id(0) % (num_kv_heads * HEAD_TILES)
    kv_head = head_tile // HEAD_TILES
    now = tl.load(step)
    m = tl.arange(0, BLOCK_M)
    d_v = tl.arange(0, BLOCK_V)
    in_group = (head_tile % HEAD_TILES) * GROUP_TILE + m % GROUP_TILE
    head = kv_head * GROUPS + in_group
    for index in tl.range(tl.load(item_offsets + program), tl.load(item_offsets + program + 1), disable_licm=True):
        item = items + index * 9
        origin = tl.load(item).to(tl.int64)
        capacity = tl.load(item + 1).to(tl.int64)
        block_first = tl.load(item + 2)
        start = tl.load(item + 3)
        stop = tl.load(item + 4)
        first_pair = tl.load(item + 5)
        num_pairs = tl.load(item + 6)
        first_slot = tl.load(item + 7)
        rotated = tl.load(item + 8)

        live = (m < num_pairs * GROUP_TILE) & (in_group < GROUPS)
        pair = first_pair + m // GROUP_TILE
        position = tl.load(pair_position + pair, mask=live, other=0)
        position += now * tl.load(position_increment + pair, mask=live, other=0)
        lo = tl.maximum(tl.load(pair_lo + pair, mask=live, other=0), position - window + 1)
        if CHUNKED:
            before = tl.load(block_start + pair, mask=live, other=0)
            before += now * tl.load(start_increment + pair, mask=live, other=0)
            lo = tl.maximum(lo, (position + before) // chunk * chunk - before)
        hi = tl.load(pair_hi + pair, mask=live, other=0) + now * tl.load(hi_increment + pair, mask=live, other=0)
        begin, end, num_tiles, first_full, num_full = _visible_tiles(start, stop, live, lo, hi, BLOCK_N)
        token = tl.load(pair_query + pair, mask=live, other=0).to(tl.int64)
        q_at = query + token[:, None] * query_stride_token + head[:, None].to(tl.int64) * query_stride_head
        load_mask = (live & (m < (end - begin) * BLOCK_M))[:, None]  # all False if no row sees the item
        if LEAD > 0:
            q = _rotated_query(q_at + LEAD, load_mask, pair, rotated, cos, sin, DIM, BLOCK_M, BLOCK_D, 0, False)
            q_lead = _rotated_query(q_at, load_mask, pair, rotated, cos, sin, LEAD, BLOCK_M, BLOCK_L, HALF, INTERLEAVED)
        else:
            q = _rotated_query(q_at, load_mask, pair, rotated, cos, sin, DIM, BLOCK_M, BLOCK_D, HALF, INTERLEAVED)
            q_lead = q

        block = _storage_row(origin % FIRST_QUANTIZED, capacity, block_first, num_kv_heads, kv_head)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_V], 0.0, tl.float32)
        k_base = keys + block * DIM
        v_base = values + block * DIM_V
        lead_base = leads + block * LEAD
        scale_base = scales + block * 2
        full = begin + first_full * BLOCK_N
        for tile in range(0, num_full):
            best, total, acc = _fold_tile(
                q, q_lead, k_base, v_base, lead_base, scale_base, full + tile * BLOCK_N, end, lo, hi, best, total, acc,
                scale, softcap, DIM, DIM_V, BLOCK_D, BLOCK_V, LEAD, BLOCK_L, BLOCK_N, False,
                SOFTCAP, PRECISION, QUANTIZED,
            )  # fmt: skip
        for edge in range(0, num_tiles - num_full):
            tile = tl.where(edge < first_full, edge, edge + num_full)
            best, total, acc = _fold_tile(
                q, q_lead, k_base, v_base, lead_base, scale_base, begin + tile * BLOCK_N, end, lo, hi, best, total, acc,
                scale, softcap, DIM, DIM_V, BLOCK_D, BLOCK_V, LEAD, BLOCK_L, BLOCK_N, True,
                SOFTCAP, PRECISION, QUANTIZED,
            )  # fmt: skip

        empty = total == 0.0
        out = acc / tl.where(empty, 1.0, total)[:, None]
        lse = tl.where(empty, float("-inf"), (best + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
        row = (first_slot + m // GROUP_TILE).to(tl.int64) * (num_kv_heads * GROUPS) + head
        tl.store(part_out + row[:, None] * DIM_V + d_v[None, :], out, mask=live[:, None] & (d_v < DIM_V)[None, :])
        tl.store(part_lse + row, lse, mask=live)


@triton.jit
def merge_kernel(
    part_out,  # float32 [S, heads, DIM_V]
    part_lse,  # float32 [S, heads]
    merge_start,  # int32 [T + 1]
    merge_slot,  # int32 [S]
    sinks,  # [heads]
    out,  # [T, heads, DIM_V]
    heads,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge one query's partial results by their log-sum-exp (Hydragen, eq. 5); a sink is a result with output zero.

    Reads each partial result once, `BLOCK_S` of them at a time. Padded queries have none, and their output is zero.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_V)
    start = tl.load(merge_start + token)
    stop = tl.load(merge_start + token + 1)
    best = float("-inf")
    total = 0.0
    if SINKS:
        best = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    acc = tl.full([BLOCK_V], 0.0, tl.float32)
    for first in range(start, stop, BLOCK_S):
        i = first + tl.arange(0, BLOCK_S)
        slot = tl.load(merge_slot + i, mask=i < stop, other=0).to(tl.int64) * heads + head
        lse = tl.load(part_lse + slot, mask=i < stop, other=float("-inf"))
        part = tl.load(part_out + slot[:, None] * DIM_V + d[None, :], mask=(i < stop)[:, None] & (d < DIM_V)[None, :])
        new_best = tl.maximum(best, tl.max(lse, 0))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp(best - anchor)
        weight = tl.exp(lse - anchor)
        acc = acc * decay + tl.sum(tl.where((i < stop)[:, None], part, 0.0) * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        best = new_best
    merged = acc / tl.where(total == 0.0, 1.0, total)
    at = (token.to(tl.int64) * heads + head) * DIM_V + d
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=d < DIM_V)


@triton.jit
def merge_heads_kernel(
    part_out,  # float32 [S, heads, DIM_V]
    part_lse,  # float32 [S, heads]
    merge_start,  # int32 [T + 1]
    merge_slot,  # int32 [S]
    sinks,  # [heads]
    out,  # [T, heads, DIM_V]
    heads,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """`merge_kernel` for many queries, with few partial results each: `BLOCK_H` heads per program.

    Two partial results are loaded together, which is all of them if a query sees a prefix and a suffix.
    """
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_V)[None, :]
    start = tl.load(merge_start + token)
    stop = tl.load(merge_start + token + 1)
    best = tl.full([BLOCK_H, 1], float("-inf"), tl.float32)
    total = tl.full([BLOCK_H, 1], 0.0, tl.float32)
    if SINKS:
        best = tl.load(sinks + head, mask=head < heads, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.full([BLOCK_H, BLOCK_V], 0.0, tl.float32)
    for first in range(start, stop, 2):
        has_second = (head < heads) & (tl.full([BLOCK_H, 1], first + 1, tl.int32) < stop)
        row_a = tl.load(merge_slot + first).to(tl.int64) * heads + head
        row_b = tl.load(merge_slot + tl.minimum(first + 1, stop - 1)).to(tl.int64) * heads + head
        lse_a = tl.load(part_lse + row_a, mask=head < heads, other=float("-inf"))
        lse_b = tl.load(part_lse + row_b, mask=has_second, other=float("-inf"))
        part_a = tl.load(part_out + row_a * DIM_V + d, mask=(head < heads) & (d < DIM_V), other=0.0)
        part_b = tl.load(part_out + row_b * DIM_V + d, mask=has_second & (d < DIM_V), other=0.0)
        new_best = tl.maximum(best, tl.maximum(lse_a, lse_b))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp(best - anchor)
        weight_a = tl.exp(lse_a - anchor)
        weight_b = tl.exp(lse_b - anchor)
        acc = acc * decay + part_a * weight_a + part_b * weight_b
        total = total * decay + weight_a + weight_b
        best = new_best
    merged = acc / tl.where(total == 0.0, 1.0, total)
    at = (token.to(tl.int64) * heads + head) * DIM_V + d
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=(head < heads) & (d < DIM_V))


@triton.jit(do_not_specialize=["now"])
def advance_kernel(
    pair_delta,  # int32 [P]
    delta_increment,  # int32 [P]
    inv_freq,  # float64 [HALF]
    cos,  # float32 [P, HALF]
    sin,  # float32 [P, HALF]
    step,  # int32 [1]
    now,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Go to decode step `now`: store it and compute the rotation tables of its pairs, with angles in float64.

    P is a multiple of `BLOCK_P`. Reads nothing that an earlier step wrote, so steps can be repeated.
    """
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    h = tl.arange(0, BLOCK_H)
    delta = tl.load(pair_delta + pair) + now * tl.load(delta_increment + pair)
    angle = delta.to(tl.float64)[:, None] * tl.load(inv_freq + h, mask=h < HALF, other=0.0)[None, :]
    at = pair[:, None] * HALF + h[None, :]
    inside = (h < HALF)[None, :] & (pair >= 0)[:, None]
    tl.store(cos + at, tl.cos(angle).to(tl.float32), mask=inside)
    tl.store(sin + at, tl.sin(angle).to(tl.float32), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(step, now)
