"""Triton kernel of checksums; see `hf_parallel.kernels.checksum`."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from hf_parallel.kernels.triton.launch import on_device

_WARPS = 4


@triton.jit
def row_sums_kernel(words, multipliers, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of one row of words, times the multipliers of each column."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    values = tl.load(words + row * WIDTH + at).to(tl.int64)
    for column in tl.static_range(COLUMNS):
        total = tl.sum(values * tl.load(multipliers + column * WIDTH + at), 0)
        tl.store(out + row * COLUMNS + column, total)


def row_sums(words: torch.Tensor, multipliers: torch.Tensor, out: torch.Tensor) -> None:
    """Write sums of rows, one program for each."""
    (rows, width), columns = words.shape, len(multipliers)
    with on_device(words.device):
        row_sums_kernel[(rows,)](words, multipliers, out, WIDTH=width, COLUMNS=columns, num_warps=_WARPS)
