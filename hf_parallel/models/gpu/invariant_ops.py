"""PyTorch's products and sums in a forward pass on a GPU, by kernels for which a row does not depend on the others.

cuBLAS chooses a kernel by the number of rows, and may cut the inputs of a product into parts; PyTorch's sums choose by
the number of results how many threads share one. `InvariantOps` replaces products of matrices, sums, means, variances,
norms and softmax of floating point numbers by the kernels of `hf_parallel.kernels.triton.invariant`. Other operations
stay with PyTorch: an elementwise operation does not depend on neighboring numbers.

vLLM's batch-invariant mode replaces operations likewise, for the whole process; here they are replaced for a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.kernels.triton.invariant import reductions
from hf_parallel.kernels.triton.invariant.products import grouped_product, product, supports

_aten = torch.ops.aten
_Number = int | float
_PLAIN = (Tensor, torch.nn.Parameter)


class InvariantOps(TorchDispatchMode):
    """Calls the kernels for products and sums of plain tensors, and PyTorch for everything else."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        compute = _OPERATIONS.get(func)
        if compute is not None and all(kind in _PLAIN for kind in types):
            result = compute(*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif _is_composite(func):  # in inference mode, PyTorch does not take it apart before
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


# Products


def _mm(x: Tensor, weight: Tensor) -> Any:
    return product(x, weight) if supports(x, weight) else NotImplemented


def _mm_out(x: Tensor, weight: Tensor, *, out: Tensor) -> Any:
    return out.copy_(product(x, weight)) if supports(x, weight, out) else NotImplemented


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not supports(x, weight) or weight.dim() != 2:
        return NotImplemented
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return product(rows, weight.T, bias).view(*x.shape[:-1], len(weight))


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: _Number = 1, alpha: _Number = 1) -> Any:
    if not supports(x, weight):
        return NotImplemented
    if beta == alpha == 1 and bias.dim() == 1 and len(bias) == weight.shape[1]:
        return product(x, weight, bias)
    return _sum_of(bias, beta, product(x, weight), alpha)


def _baddbmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: _Number = 1, alpha: _Number = 1) -> Any:
    return _sum_of(bias, beta, product(x, weight), alpha) if supports(x, weight) else NotImplemented


def _sum_of(bias: Tensor, beta: _Number, products: Tensor, alpha: _Number) -> Tensor:
    if alpha != 1:
        products = products * alpha
    return products + beta * bias if beta else products  # NaN in what is not added has no effect


def _mv(matrix: Tensor, vector: Tensor) -> Any:
    return product(matrix, vector[:, None])[:, 0] if supports(matrix, vector) else NotImplemented


def _dot(x: Tensor, y: Tensor) -> Any:
    return product(x[None], y[:, None])[0, 0] if supports(x, y) else NotImplemented


def _grouped(
    x: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Rows of `x` `[N, inputs]` in groups that end at `offs`, times the matrix `[inputs, outputs]` of each group."""
    if x.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None or not supports(x, weights):
        return NotImplemented
    out = grouped_product(x, weights, offs)
    return out if out_dtype is None else out.to(out_dtype)


# Sums


def _sum(
    x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dtype = dtype or x.dtype
    if not supports(x) or not _is_summed(dtype):
        return NotImplemented
    return reductions.total(x, _dims(dim), keepdim).to(dtype)


def _mean(
    x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dtype = dtype or x.dtype
    if not supports(x) or not _is_summed(dtype):
        return NotImplemented
    return (reductions.total(x, _dims(dim), keepdim) / _count(x, _dims(dim))).to(dtype)


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: _Number | None = None, keepdim: bool = False
) -> Any:
    if not supports(x):
        return NotImplemented
    dims = _dims(dim)
    count = _count(x, dims)
    mean = reductions.total(x, dims, keepdim=True) / count
    deviation = x.float() - mean
    squares = reductions.total(deviation * deviation, dims, keepdim)
    divisor = max(count - (1 if correction is None else correction), 0)
    return (squares / divisor).to(x.dtype), mean.view_as(squares).to(x.dtype)


def _var(x: Tensor, dim: Sequence[int] | None = None, **given: Any) -> Any:
    result = _var_mean(x, dim, **given)
    return result if result is NotImplemented else result[0]


def _std(x: Tensor, dim: Sequence[int] | None = None, **given: Any) -> Any:
    result = _var_mean(x, dim, **given)
    return result if result is NotImplemented else result[0].sqrt()


def _vector_norm(
    x: Tensor,
    ord: _Number = 2,  # noqa: A002 (its name in PyTorch)
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    dtype = dtype or x.dtype
    if ord != 2 or not supports(x) or not _is_summed(dtype):
        return NotImplemented
    return reductions.total(x.float().square(), _dims(dim), keepdim).sqrt().to(dtype)


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    if not supports(x):
        return NotImplemented
    dims = _last(len(shape))
    mean = reductions.total(x, dims, keepdim=True) / math.prod(shape)
    deviation = x.float() - mean
    squares = reductions.total(deviation * deviation, dims, keepdim=True)
    inverse = torch.rsqrt(squares / math.prod(shape) + eps)
    out = deviation * inverse
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype), mean, inverse


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    if not supports(x):
        return NotImplemented
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    wide = x.float()
    squares = reductions.total(wide * wide, _last(len(shape)), keepdim=True)
    inverse = torch.rsqrt(squares / math.prod(shape) + eps)
    out = wide * inverse
    if weight is not None:
        out = out * weight
    return out.to(x.dtype), inverse


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    return _softmax_of(x, dim, half_to_float, False)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    return _softmax_of(x, dim, half_to_float, True)


def _softmax_of(x: Tensor, dim: int, half_to_float: bool, log: bool) -> Any:
    if not supports(x):
        return NotImplemented
    return reductions.softmax(x, dim, torch.float32 if half_to_float else x.dtype, log)


def _index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: _Number = 1) -> Any:
    """Add in the order of the indices, by `index_put_`. On CUDA, `index_add_` adds in the order of threads."""
    if not supports(x, source) or index.dim() != 1 or alpha != 1:
        return NotImplemented
    x.movedim(dim, 0).index_put_((index,), source.movedim(dim, 0), accumulate=True)
    return x


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: _Number = 1) -> Any:
    return _index_add_(x.clone(), dim, index, source, alpha=alpha)


def _is_summed(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def _dims(dim: Sequence[int] | int | None) -> Sequence[int]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, int) else dim


def _last(count: int) -> Sequence[int]:
    return range(-count, 0)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims) if dims and x.dim() else x.numel()


_OPERATIONS: dict[object, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.mm.out: _mm_out,
    _aten.bmm.default: _mm,
    _aten.linear.default: _linear,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.mv.default: _mv,
    _aten.dot.default: _dot,
    _aten._grouped_mm.default: _grouped,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.var.correction: _var,
    _aten.var_mean.correction: _var_mean,
    _aten.std.correction: _std,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.native_layer_norm.default: _layer_norm,
    _aten._fused_rms_norm.default: _rms_norm,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten.index_add_.default: _index_add_,
    _aten.index_add.default: _index_add,
}
