"""Sums over dimensions and softmax by Triton kernels: a row has the same bits whatever other rows there are.

PyTorch chooses by the number of results how many threads share a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_parallel.kernels.triton.invariant.reduction_kernels import softmax_kernel, sum_columns_kernel, sum_rows_kernel
from hf_parallel.kernels.triton.launch import aligned, on_device

_BLOCK = 1024
_COLUMNS = 256


def total(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return the float32 sums of numbers of at most 32 bits over some dimensions; none: over all."""
    dims = sorted(dim % x.dim() for dim in dims) if x.dim() and dims else list(range(x.dim()))
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    shape = [x.shape[dim] for dim in kept]
    shape_with_dims = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
    size = math.prod(x.shape[dim] for dim in dims)
    out = torch.zeros(shape, dtype=torch.float32, device=x.device)
    if x.numel():
        # Dimensions after the summed ones stay there, if those are consecutive; otherwise the summed ones go last.
        consecutive = not dims or dims[-1] - dims[0] + 1 == len(dims)
        inner = math.prod(x.shape[dims[-1] + 1 :]) if dims and consecutive else 1
        if not consecutive:
            x = x.permute(*kept, *dims)
        x = aligned(x)
        outer = x.numel() // (size * inner)
        with on_device(x.device):
            if inner == 1:
                sum_rows_kernel[(outer,)](x, out, size, BLOCK=_BLOCK, num_warps=4)
            else:
                grid = outer, -(-inner // _COLUMNS)
                sum_columns_kernel[grid](x, out, size, inner, BLOCK=_COLUMNS, num_warps=4)
    if keepdim:
        return out.view(shape_with_dims)
    return out


def softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool = False) -> Tensor:
    """Return the softmax of numbers of at most 32 bits over a dimension, or its logarithm, in a dtype."""
    moved = aligned(x.movedim(dim, -1)) if x.dim() else x.reshape(1)
    out = torch.empty_like(moved, dtype=dtype)
    if x.numel():
        size = moved.shape[-1]
        with on_device(x.device):
            softmax_kernel[(moved.numel() // size,)](moved, out, size, BLOCK=_BLOCK, LOG=log, num_warps=4)
    return out.movedim(-1, dim) if x.dim() else out.reshape(())
