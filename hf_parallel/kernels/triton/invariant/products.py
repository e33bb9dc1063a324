"""Products of matrices by one Triton kernel: an element has the same bits whatever other rows and columns there are.

Libraries choose a kernel by the number of rows, and may cut the inputs into parts. Here each element is one sum over
the inputs in one order, in tiles whose size depends on the dtype alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from hf_parallel.kernels.triton.invariant.product_kernels import grouped_product_kernel, product_kernel
from hf_parallel.kernels.triton.launch import aligned, on_device

_HALVES = (torch.float16, torch.bfloat16)


class ProductTiling(NamedTuple):
    """Configuration of the product kernels: rows, columns and inputs per step of a program, warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def num_tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the numbers of tiles over rows and over columns."""
        return -(-rows // self.block_m), -(-columns // self.block_n)

    def constants(self, dtype: torch.dtype) -> dict[str, int | str]:
        """Return the arguments of a kernel."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def product_tiling(dtype: torch.dtype) -> ProductTiling:
    """Return the only tiling of products in a dtype, for any number of rows and columns."""
    return ProductTiling(64, 64, 64, 4, 4) if dtype in _HALVES else ProductTiling(32, 32, 32, 4, 3)


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these: of one device and dtype, floating point numbers of at most 32 bits."""
    first = tensors[0]
    if any(x.dtype != first.dtype or x.device != first.device for x in tensors):
        return False
    if knobs.runtime.interpret:  # which multiplies bfloat16 as integers
        return first.dtype in (torch.float32, torch.float16)
    return first.device.type == "cuda" and first.dtype in (torch.float32, *_HALVES)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight + bias`, with float32 sums.

    Parameters
    ----------
    x : [M, K] or [B, M, K]
    weight : [K, N] or [B, K, N]
        Of the dtype of `x`, with any strides.
    bias : [N], optional
        Of any dtype; it is added in float32.

    Returns
    -------
    torch.Tensor
        `[M, N]` or `[B, M, N]` of the dtype of `x`.
    """
    if x.dim() == 2:
        return product(x[None], weight[None], bias)[0]
    batch, rows, inputs = x.shape
    columns = weight.shape[2]
    if not inputs or not x.numel() or not columns:
        out = x.new_zeros(batch, rows, columns)
        return out if bias is None else out + bias.to(x.dtype)
    x = aligned(x)
    weight = _aligned_weight(weight)
    out = x.new_empty(batch, rows, columns)
    tiling = product_tiling(x.dtype)
    row_tiles, column_tiles = tiling.num_tiles(rows, columns)
    with on_device(x.device):
        product_kernel[(batch * row_tiles * column_tiles,)](
            x, weight, out if bias is None else aligned(bias), out, rows, columns,
            inputs, weight.stride(1), weight.stride(2), rows * inputs, weight.stride(0), rows * columns,
            K=inputs, BIAS=bias is not None, **tiling.constants(x.dtype),
        )  # fmt: skip
    return out


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of each group times the matrix of the group, such as an expert.

    `x` is `[M, K]`, sorted by group, `weights` `[G, K, N]`, and `ends`, int `[G]` on the device, are the numbers of the
    rows at which groups end. Rows after the last group are zero. Returns `[M, N]`.
    """
    rows, inputs = x.shape
    groups, _, columns = weights.shape
    out = x.new_zeros(rows, columns)
    if not out.numel():
        return out
    x = aligned(x)
    weights = _aligned_weight(weights)
    tiling = product_tiling(x.dtype)
    row_tiles, column_tiles = tiling.num_tiles(rows, columns)
    with on_device(x.device):
        grouped_product_kernel[((row_tiles + groups) * column_tiles,)](
            x, weights, ends.to(torch.int32), out, groups, columns,
            inputs, weights.stride(1), weights.stride(2), weights.stride(0), K=inputs,
            **tiling.constants(x.dtype),
        )  # fmt: skip
    return out


def _aligned_weight(weight: Tensor) -> Tensor:
    """Return matrices `[.., K, N]` with contiguous rows or columns."""
    if 1 not in weight.stride()[-2:] or weight.data_ptr() % 16:
        return weight.contiguous().clone()
    return weight
