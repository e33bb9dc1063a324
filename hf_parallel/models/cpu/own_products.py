"""Products in models' own code on a CPU, such as of routers and experts, by the kernel of linear layers.

A module that multiplies by parameters of its own calls PyTorch's functions, whose last bits depend on the number of
tokens. Within its `forward` these functions call `product`: an expert's product of a token does not depend on which
other tokens the expert got. So do its gates (`gates.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import native
from hf_parallel.models.cpu.gates import GATES, names_in
from hf_parallel.models.cpu.linear import PACKINGS, is_computable, is_computed, product
from hf_parallel.models.cpu.packed import PackedLinear
from hf_parallel.models.intercept.modules import Forward

_KEYWORDS = {"weight", "bias", "offs"}
"""Arguments by name that the products below take."""
_WITHOUT_PRODUCTS = (nn.Embedding, nn.modules.conv._ConvNd, nn.LayerNorm)


def own_products(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the modules of a model that multiply in their own code, with a `forward` by the kernel's products."""
    if not native.is_available():
        return
    for module in all_modules(model):
        if "forward" not in vars(module) and _multiplies(module):
            yield module, _with_products(type(module).forward)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module's own code multiplies by matrices, of the module or of its parts."""
    kind = type(module)
    if kind in (nn.Linear, Conv1D, PackedLinear) or isinstance(module, _WITHOUT_PRODUCTS):
        return False
    names = names_in(kind.forward)
    if "linear" in names and not names.isdisjoint({"F", "functional"}):
        return True
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() in (2, 3)]
    if not matrices or not all(is_computed(matrix) for matrix in matrices):
        return False
    return isinstance(module, nn.Linear) or not names.isdisjoint({"@", "bmm", "matmul", "mm"})


def _with_products(plain: Forward) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _KernelProducts():
            return plain(self, *args, **kwargs)

    return forward


class _KernelProducts(TorchFunctionMode):
    """Computes products of activations and matrices, and gates, by the kernels; calls other functions as they are."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in GATES:
            return GATES[func](*args, **kwargs)
        compute = _PRODUCTS.get(func)
        result = NotImplemented
        if compute is not None and not torch.compiler.is_compiling():
            given = {name: value for name, value in kwargs.items() if value is not None}
            if given.keys() <= _KEYWORDS:
                result = compute(*args, **given)
        return func(*args, **kwargs) if result is NotImplemented else result


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _multiplied(x, weight.T, bias) if weight.dim() == 2 else NotImplemented


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return _multiplied(x, weight) if weight.dim() == 2 and x.dim() >= 2 else NotImplemented


def _bmm(x: torch.Tensor, weights: torch.Tensor) -> Any:
    parts = [_multiplied(matrix, weight) for matrix, weight in zip(x, weights, strict=True)]
    return torch.stack(parts) if _are_tensors(parts) else NotImplemented


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> Any:
    """Rows of `x` `[N, inputs]` in groups that end at `offs`, times the matrix `[inputs, outputs]` of each group."""
    if x.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None:
        return NotImplemented
    parts = []
    first = 0
    for end, weight in zip(offs.tolist(), weights, strict=True):
        if end > first:
            parts.append(_multiplied(x[first:end], weight))
        first = end
    if not _are_tensors(parts):
        return NotImplemented
    if first < len(x):  # rows of no group
        parts.append(x.new_zeros(len(x) - first, weights.shape[2]))
    return torch.cat(parts)


def _are_tensors(parts: Sequence[object]) -> bool:
    return bool(parts) and all(isinstance(part, torch.Tensor) for part in parts)


def _multiplied(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Return `x` times a matrix `[inputs, outputs]`; NotImplemented if the kernel does not compute it."""
    if x.dtype != matrix.dtype or x.dtype not in PACKINGS or not is_computable(x, len(matrix)):
        return NotImplemented
    packing = PACKINGS[x.dtype]
    if is_computed(matrix.T):
        return product(x, matrix.T, bias, packing)
    if is_computed(matrix):
        return product(x, matrix, bias, packing, by_inputs=True)
    return NotImplemented


_PRODUCTS: dict[object, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _bmm,
    torch._grouped_mm: _grouped,
}
