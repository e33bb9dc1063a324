"""Triton kernels of products, whose elements do not depend on other rows or columns; `products.py` launches them.

An element is a float32 sum over all inputs in one order: no program shares it with others, and nothing is tuned by the
number of rows.
"""

# Arguments without annotation are pointers and scalars: Triton reads annotations itself.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _product_tile(
    x,  # pointer to the first row
    weight,  # pointer to the matrix
    bias,
    out,
    first_row, stop_row, first_column, num_columns,
    x_stride, weight_stride_k, weight_stride_n, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows `first_row` to `stop_row`, at most `BLOCK_M`, of `x` times `BLOCK_N` columns of a matrix."""
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    is_row = row < stop_row
    is_column = column < num_columns
    safe_row = tl.where(is_row, row, first_row).to(tl.int64)
    safe_column = tl.where(is_column, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + safe_row[:, None] * x_stride + k[None, :]
    weight_at = weight + k[:, None].to(tl.int64) * weight_stride_k + safe_column[None, :] * weight_stride_n
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for first in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_at)
            b = tl.load(weight_at)
        else:
            is_inside = first + k < K
            a = tl.load(x_at, mask=is_inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=is_inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x_at += BLOCK_K
        weight_at += BLOCK_K * weight_stride_k
    if BIAS:
        acc += tl.load(bias + safe_column).to(tl.float32)[None, :]
    at = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows", "x_batch_stride", "out_batch_stride"])
def product_kernel(
    x,  # [B, M, K], rows contiguous
    weight,  # [B, K, N]
    bias,  # [N]
    out,  # [B, M, N], contiguous
    num_rows, num_columns,
    x_stride, weight_stride_k, weight_stride_n,
    x_batch_stride, weight_batch_stride, out_batch_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out = x @ weight + bias` for each of `B` matrices; a program computes one tile."""
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    tiles = tl.cdiv(num_rows, BLOCK_M) * column_tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    first_row = tile // column_tiles * BLOCK_M
    first_column = tile % column_tiles * BLOCK_N
    _product_tile(
        x + batch * x_batch_stride, weight + batch * weight_batch_stride, bias, out + batch * out_batch_stride,
        first_row, num_rows, first_column, num_columns, x_stride, weight_stride_k, weight_stride_n, num_columns,
        K, BLOCK_M, BLOCK_N, BLOCK_K, BIAS, PRECISION,
    )  # fmt: skip


@triton.jit
def grouped_product_kernel(
    x,  # [M, K], rows contiguous
    weight,  # [G, K, N]
    ends,  # int32 [G], ascending: the rows of group g end before row ends[g]
    out,  # [M, N], contiguous
    num_groups, num_columns,
    x_stride, weight_stride_k, weight_stride_n, weight_group_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of each group times the matrix of the group, such as an expert. Rows of no group are not written.

    Tiles do not cross groups. A program finds the group of its tile by counting, so the CPU need not know them.
    """
    tiles = tl.cdiv(num_columns, BLOCK_N)
    tile = tl.program_id(0) // tiles
    first_column = tl.program_id(0) % tiles * BLOCK_N
    start = 0
    counted = 0
    group = -1
    first_row = 0
    stop_row = 0
    for number in range(0, num_groups):
        end = tl.load(ends + number)
        count = tl.cdiv(end - start, BLOCK_M)
        is_here = (tile >= counted) & (tile < counted + count)
        group = tl.where(is_here, number, group)
        first_row = tl.where(is_here, start + (tile - counted) * BLOCK_M, first_row)
        stop_row = tl.where(is_here, end, stop_row)
        counted += count
        start = end
    if group >= 0:
        _product_tile(
            x, weight + group.to(tl.int64) * weight_group_stride, x, out, first_row, stop_row, first_column,
            num_columns, x_stride, weight_stride_k, weight_stride_n, num_columns,
            K, BLOCK_M, BLOCK_N, BLOCK_K, False, PRECISION,
        )  # fmt: skip
