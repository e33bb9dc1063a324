"""Linear layers on a CPU, computed in float32: a compiled kernel for few tokens, oneDNN for more.

A decode step is bound by reading the weights, so a few rows, or a draft, should cost little more than one token. With
MKL, which PyTorch uses, passes of two to eight tokens took up to twice as long as passes of one (docs/cpu.md).
Weights in bfloat16, or packed (`packed.py`), are converted where they are used; PyTorch's products in bfloat16 are
slow on processors without instructions for them. `HF_PARALLEL_LINEAR=torch` leaves the layers to PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import native
from hf_parallel.models.intercept.modules import replaced_forwards

LINEAR_VARIABLE = "HF_PARALLEL_LINEAR"
LEAST_WEIGHTS = 1 << 16  # smaller layers are left to PyTorch: the library makes no difference
PACKINGS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_MOST_UNPACKED = 1 << 22  # weights of a layer that are in float32 at a time

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
def kernel_pass() -> Iterator[None]:
    """Let the C kernels compute layers of a forward pass over a block cache.

    Which library computes linear layers, and whether gradients or autocast forbid it, cannot change within a pass: it
    is asked here, once, and the layers look at `pass_library`.
    """
    token = pass_library.set("" if _is_forbidden() else _backend())
    try:
        yield
    finally:
        pass_library.reset(token)


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Compute a model's large linear layers on the CPU with the compiled kernel and oneDNN.

    Layers in bfloat16 are computed in float32 if the processor has no instructions for bfloat16. Results differ from
    PyTorch's in the last bits, as they do between batch sizes. Layers whose `forward` was already replaced are left
    unchanged; calls that need gradients or run under autocast use PyTorch. Other threads also see the replacement.
    Raises `ValueError` if `HF_PARALLEL_LINEAR` names an unknown or unavailable library.
    """
    layers = [layer for layer in all_modules(model) if _is_large_linear(layer)] if _backend() != "torch" else []
    with replaced_forwards((layer, _forward) for layer in layers):
        yield


def linear_backend(model: PreTrainedModel) -> str:
    """Return the library whose costs `pass_cost` uses for a model: `native`, `onednn` or `torch` (on other devices)."""
    backend = _backend() if _is_computed(next(model.parameters())) else "torch"
    return "onednn" if backend == "native" and not native.is_available() else backend


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
    if name in ("native", "onednn") and not has_onednn:
        raise ValueError(f"{LINEAR_VARIABLE}={name} cannot be used: this PyTorch was built without oneDNN")
    if name == "native" and (reason := native.unavailable_reason()):
        raise ValueError(f"{LINEAR_VARIABLE}=native cannot be used: {reason}")
    # Without MKL (on ARM), nothing was measured: PyTorch computes the layers.
    return name or ("native" if has_onednn and torch.backends.mkl.is_available() else "torch")


def _is_large_linear(module: nn.Module) -> bool:
    weight = module.weight if type(module) is nn.Linear and "forward" not in vars(module) else None
    return type(weight) is nn.Parameter and weight.numel() >= LEAST_WEIGHTS and _is_computed(weight)


def _is_computed(parameter: torch.Tensor) -> bool:
    if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return False
    is_slow = parameter.dtype == torch.float32 or (native.is_available() and not native.has_bfloat16())
    return is_slow and parameter.is_contiguous()


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packing: str, int8: bool = False
) -> torch.Tensor:
    """Return `x W^T + b`, computed in float32, in the dtype of `x`, with the weights and `int8` of `native.linear`."""
    dtype = x.dtype
    inputs = x.shape[-1]
    if not x.numel():  # a chunk of a prompt that needs no logits
        return x.new_empty(*x.shape[:-1], len(weight))
    x = x.float()
    if bias is not None:
        bias = bias.float()
    is_native = native.supports_linear(x.numel() // inputs, packing) and (pass_library.get() or _backend()) != "onednn"
    if int8 or is_native:
        return native.linear(x, weight, bias, packing, int8=int8).to(dtype)
    if packing == "F32":
        return _by_onednn(x, weight, bias)
    rows = max(1, _MOST_UNPACKED // inputs)
    if len(weight) <= rows:
        return _by_onednn(x, native.unpack(weight, packing), bias).to(dtype)
    result = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        unpacked = native.unpack(weight[part], packing)
        result[..., part] = _by_onednn(x, unpacked, None if bias is None else bias[part])
    return result


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
    """`nn.Linear.forward` by the compiled kernel for few tokens, by oneDNN for more."""
    weight = self.weight
    bias = self.bias
    if not is_computable(input, weight.shape[-1]) or type(input) is not torch.Tensor or input.dtype != weight.dtype:
        return _PLAIN(self, input)
    if not _is_computed(weight):
        return _PLAIN(self, input)
    if bias is not None and (bias.shape != weight.shape[:1] or not _is_computed(bias)):
        return _PLAIN(self, input)
    return product(input, weight, bias, PACKINGS[input.dtype])


def is_computable(x: torch.Tensor, inputs: int) -> bool:
    """Whether the kernels compute a layer of `inputs` inputs: not with gradients, autocast or a compiler."""
    if torch.compiler.is_compiling():
        return False
    if not pass_library.get() and _is_forbidden():  # the latter outside of passes, as in a call of the model itself
        return False
    return x.shape[-1] == inputs and x.device.type == "cpu"


def _is_forbidden() -> bool:
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
