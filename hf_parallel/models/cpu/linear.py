"""Linear layers on a CPU, computed in float32 by a compiled kernel, so that a token's result does not depend on others.

The result of a token is the same to the last bit alone, in any batch, in any chunk of a prompt, and with any number of
threads (`cpu_linear.c`). A decode step is bound by reading the weights, so a few rows, or a draft, cost little more
than one token. Weights in half precision, or packed (`packed.py`), are converted where they are used; PyTorch's
products in half precision are slow on processors without instructions for them. `HF_PARALLEL_LINEAR=torch` leaves the
layers to PyTorch, and `onednn` to oneDNN, which computes them without a C compiler, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import native
from hf_parallel.models.intercept.modules import Forward, replaced_forwards

LINEAR_VARIABLE = "HF_PARALLEL_LINEAR"
PACKINGS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

_PASSES: dict[str, dict[int, float]] = {
    "native": {1: 1.0, 8: 1.0, 16: 1.68, 32: 2.3, 128: 5.6},
    "onednn": {1: 1.0, 2: 1.36, 8: 1.4, 16: 1.62, 32: 1.84, 128: 4.2},
    "torch": {1: 1.0, 2: 1.5, 8: 1.5, 16: 1.77, 32: 2.2, 128: 5.3},
}
"""Duration of a forward pass by its number of tokens, relative to a pass of one token, for each library: measured in
float32 on an AMD EPYC (docs/cpu.md). Native passes of up to eight tokens took up to 1.1; the table says 1."""
_PLAIN = nn.Linear.forward

pass_library: ContextVar[str] = ContextVar("hf_parallel_pass_library", default="")
"""Library that computes linear layers in the forward pass of this thread, see `kernel_pass`; empty outside of it."""


@contextmanager
def kernel_pass(records_gradients: bool = False) -> Iterator[None]:
    """Let the C kernels compute layers of a forward pass over a block cache.

    Which library computes linear layers, and whether gradients or autocast forbid it, cannot change within a pass: it
    is asked here, once, and the layers look at `pass_library`. With `records_gradients` gradients do not forbid it: the
    kernels compute the forward pass, PyTorch the gradients.
    """
    is_forbidden = torch.is_autocast_enabled("cpu") if records_gradients else _is_forbidden()
    token = pass_library.set("" if is_forbidden else _backend())
    try:
        yield
    finally:
        pass_library.reset(token)


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Compute a model's linear layers on the CPU with the compiled kernel, or oneDNN.

    Layers in half precision are computed in float32 if the processor has no instructions for it. Results differ from
    PyTorch's in the last bits, as they do between batch sizes. Layers whose `forward` was already replaced are left
    unchanged; calls under autocast, and those with gradients outside of a `kernel_pass` that records them, use PyTorch.
    Other threads also see the replacement.
    Raises `ValueError` if `HF_PARALLEL_LINEAR` names an unknown or unavailable library.
    """
    forwards = []
    if _backend() != "torch":
        forwards += [(layer, _FORWARDS[type(layer)]) for layer in all_modules(model) if _is_replaced(layer)]
    with replaced_forwards(forwards):
        yield


def linear_backend(model: PreTrainedModel) -> str:
    """Return the library whose costs `pass_cost` uses for a model: `native`, `onednn` or `torch` (on other devices)."""
    return _backend() if is_computed(next(model.parameters())) else "torch"


@cache
def pass_cost(tokens: int, linear_backend: str) -> float:
    """Return the duration of a pass of `tokens` tokens, relative to a pass of one token."""
    costs = _PASSES[linear_backend]
    return float(np.interp(tokens, list(costs), list(costs.values()))) * max(1.0, tokens / max(costs))


def _backend() -> str:
    is_patched = not torch.backends.mkldnn.enabled or nn.Linear.forward is not _PLAIN
    return "torch" if is_patched else _library(os.environ.get(LINEAR_VARIABLE, ""))


@cache
def _library(name: str) -> str:
    if name not in ("", *_PASSES):
        raise ValueError(f"{LINEAR_VARIABLE} must be one of {list(_PASSES)}, got {name!r}")
    has_onednn = torch.backends.mkldnn.is_available()
    if name == "onednn" and not has_onednn:
        raise ValueError(f"{LINEAR_VARIABLE}=onednn cannot be used: this PyTorch was built without oneDNN")
    if name == "native" and (reason := native.unavailable_reason()):
        raise ValueError(f"{LINEAR_VARIABLE}=native cannot be used: {reason}")
    if name:
        return name
    if not torch.backends.mkl.is_available():  # on ARM, nothing was measured
        return "torch"
    if native.is_available():
        return "native"
    return "onednn" if has_onednn else "torch"


def _is_replaced(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer that the kernels compute."""
    if type(module) not in _FORWARDS or "forward" in vars(module):
        return False
    weight: object = module.weight
    return type(weight) is nn.Parameter and weight.dim() == 2 and is_computed(weight)


def is_computed(parameter: torch.Tensor) -> bool:
    """Whether the kernels compute layers with weights like these."""
    if parameter.device.type != "cpu" or parameter.stride(-1) != 1:
        return False
    if parameter.dtype == torch.bfloat16:
        return native.is_available() and not native.has_bfloat16()
    if parameter.dtype == torch.float16:
        return native.is_available() and not native.has_float16()
    return parameter.dtype == torch.float32


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    packing: str,
    *,
    by_inputs: bool = False,
    int8: bool = False,
) -> torch.Tensor:
    """Return `x W^T + b`, computed in float32, in the dtype of `x`, with the arguments of `native.linear`."""
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias, packing, by_inputs, int8)  # type: ignore[no-any-return]
    dtype = x.dtype
    if not x.numel():  # a chunk of a prompt that needs no logits
        return x.new_empty(*x.shape[:-1], weight.shape[1] if by_inputs else len(weight))
    x = x.float()
    if bias is not None:
        bias = bias.float().contiguous()
    if packing == "F32" and (pass_library.get() or _backend()) == "onednn":
        if by_inputs:
            return F.linear(x, weight.T, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return native.linear(x, weight, bias, packing, by_inputs=by_inputs, int8=int8).to(dtype)


class _Product(torch.autograd.Function):
    """`product`, with the gradients of the unrounded product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packing: str,
        by_inputs: bool,
        int8: bool,
    ) -> torch.Tensor:
        """Return the product."""
        # A layer whose weights are frozen, as below an adapter, does not keep its input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.packing = packing
        ctx.by_inputs = by_inputs
        return product(x, weight, bias, packing, by_inputs=by_inputs, int8=int8)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        (grad_output,) = grad_outputs
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        x_grad = weight_grad = bias_grad = None
        if of_x:
            unpacked = weight if weight.dtype == grad.dtype else native.unpack(weight, ctx.packing).to(grad.dtype)
            x_grad = grad @ (unpacked.T if ctx.by_inputs else unpacked)
            x_grad = x_grad.view(*grad_output.shape[:-1], x_grad.shape[-1])
        if of_weight:
            weight_grad = grad.T @ x.reshape(-1, x.shape[-1])
            if ctx.by_inputs:
                weight_grad = weight_grad.T
        if of_bias:
            bias_grad = grad.sum(0)
        return x_grad, weight_grad, bias_grad, None, None, None


def _linear(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
    """`nn.Linear.forward` by the kernels."""
    weight = self.weight
    if _applies(input, weight, weight.shape[1]):
        return product(input, weight, self.bias, PACKINGS[weight.dtype])
    return _PLAIN(self, input)


def _conv1d(self: Conv1D, x: torch.Tensor) -> torch.Tensor:
    """`Conv1D.forward`, a linear layer of GPT-2 with transposed weights, by the kernels."""
    weight = self.weight
    if _applies(x, weight, weight.shape[0]):
        return product(x, weight, self.bias, PACKINGS[weight.dtype], by_inputs=True)
    return Conv1D.forward(self, x)


_FORWARDS: dict[type[nn.Module], Forward] = {nn.Linear: _linear, Conv1D: _conv1d}


def _applies(x: torch.Tensor, weight: torch.Tensor, inputs: int) -> bool:
    """Whether the kernels compute a layer for this input."""
    if type(x) is not torch.Tensor or x.dtype != weight.dtype:
        return False
    return is_computable(x, inputs) and is_computed(weight)  # which may have moved since


def is_computable(x: torch.Tensor, inputs: int) -> bool:
    """Whether the kernels compute a layer of `inputs` inputs: not with autocast or a compiler.

    With gradients, only in a `kernel_pass` that records them.
    """
    if torch.compiler.is_compiling():
        return False
    if not pass_library.get() and _is_forbidden():  # the latter outside of passes, as in a call of the model itself
        return False
    return x.shape[-1] == inputs and x.device.type == "cpu"


def _is_forbidden() -> bool:
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
