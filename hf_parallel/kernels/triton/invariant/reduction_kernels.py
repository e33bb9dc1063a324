"""Triton kernels of sums over dimensions and of softmax, one program for each result; `reductions.py` launches them.

Sums are in float32, in one order for each size of the dimension that is summed.
"""

# Arguments without annotation are pointers and scalars: Triton reads annotations itself.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def sum_rows_kernel(
    x,  # [M, N], contiguous
    out,  # float32 [M]
    N,
    BLOCK: tl.constexpr,
):
    """Sum of each row: `BLOCK` partial sums, which are added at the end."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        total += tl.load(x + row * N + first + n, mask=first + n < N, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit
def sum_columns_kernel(
    x,  # [M, N, D], contiguous
    out,  # float32 [M, D]
    N,
    D,
    BLOCK: tl.constexpr,
):
    """Sum over the middle dimension, in its order."""
    outer = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for n in range(0, N):
        total += tl.load(x + (outer * N + n) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + outer * D + d, total, mask=d < D)


@triton.jit
def softmax_kernel(
    x,  # [M, N], contiguous
    out,  # [M, N]
    N,
    BLOCK: tl.constexpr,
    LOG: tl.constexpr,
):
    """Softmax of each row, or its logarithm."""
    row = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, N, BLOCK):
        part = tl.load(x + row + first + n, mask=first + n < N, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, part)
    best = tl.max(most, 0)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        part = tl.load(x + row + first + n, mask=first + n < N, other=float("-inf")).to(tl.float32)
        total += tl.exp(part - best)
    sum_of_all = tl.sum(total, 0)
    for first in range(0, N, BLOCK):
        part = tl.load(x + row + first + n, mask=first + n < N, other=float("-inf")).to(tl.float32) - best
        if LOG:
            part = part - tl.log(sum_of_all)
        else:
            part = tl.exp(part) / sum_of_all
        tl.store(out + row + first + n, part.to(out.dtype.element_ty), mask=first + n < N)
