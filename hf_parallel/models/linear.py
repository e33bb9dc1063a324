"""Linear layers on a CPU in float32: a compiled kernel for few tokens, oneDNN for more.

A decode step is bound by reading the weights, so a few rows, or a draft, should cost little more than one token. With
MKL, which PyTorch uses, passes of two to eight tokens took up to twice as long as passes of one (docs/cpu.md).
`HF_PARALLEL_LINEAR=torch` leaves the layers to PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import native

LINEAR_VARIABLE = "HF_PARALLEL_LINEAR"
LEAST_WEIGHTS = 1 << 16  # smaller layers are left to PyTorch: the library makes no difference

_PASSES: dict[str, dict[int, float]] = {
    "native": {1: 1.0, 8: 1.0, 16: 1.68, 32: 2.3, 128: 5.6},
    "onednn": {1: 1.0, 2: 1.36, 8: 1.4, 16: 1.62, 32: 1.84, 128: 4.2},
    "torch": {1: 1.0, 2: 1.5, 8: 1.5, 16: 1.77, 32: 2.2, 128: 5.3},
}
"""Duration of a forward pass by its number of tokens, relative to a pass of one token, for each library: measured in
float32 on an AMD EPYC (docs/cpu.md). Native passes of up to eight tokens took up to 1.1; the table says 1."""
_PLAIN = nn.Linear.forward


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Compute a model's large float32 linear layers on the CPU with the compiled kernel and oneDNN.

    Results differ from PyTorch's in the last bits, as they do between batch sizes. Layers whose `forward` was already
    replaced are left unchanged; calls that need gradients or run under autocast use PyTorch. Other threads also see the
    replacement. Raises `ValueError` if `HF_PARALLEL_LINEAR` names an unknown or unavailable library.
    """
    forward = _replacement()
    replaced = []
    if forward is not None:
        replaced = [(layer, MethodType(forward, layer)) for layer in all_modules(model) if _is_large_linear(layer)]
    try:
        for layer, method in replaced:
            layer.forward = method  # type: ignore[method-assign]
        yield
    finally:
        for layer, method in replaced:
            if vars(layer).get("forward") is method:  # unless it was replaced meanwhile
                del layer.forward


def linear_backend(model: PreTrainedModel) -> str:
    """Return the library whose costs `pass_cost` uses for a model: `native`, `onednn` or `torch`.

    Costs were measured on a CPU in float32: other dtypes and devices use those of `torch`.
    """
    forward = _replacement()
    if forward is None or model.dtype != torch.float32 or model.device.type != "cpu":
        return "torch"
    return "native" if forward is _forward and native.supports_linear(1) else "onednn"


@cache
def pass_cost(tokens: int, linear_backend: str) -> float:
    """Return the duration of a pass of `tokens` tokens, relative to a pass of one token."""
    costs = _PASSES[linear_backend]
    return float(np.interp(tokens, list(costs), list(costs.values()))) * max(1.0, tokens / max(costs))


def _replacement() -> Callable[..., torch.Tensor] | None:
    library = _library(os.environ.get(LINEAR_VARIABLE, ""))
    if library == "torch" or not torch.backends.mkldnn.enabled or nn.Linear.forward is not _PLAIN:
        return None
    return _forward if library == "native" else _forward_by_onednn


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
    return type(weight) is nn.Parameter and weight.numel() >= LEAST_WEIGHTS and _is_contiguous_float32(weight)


def _is_contiguous_float32(parameter: torch.Tensor) -> bool:
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
    """`nn.Linear.forward` by the compiled kernel for few tokens, by oneDNN for more."""
    if _is_supported(self, input) and input.shape[-1:] == self.weight.shape[1:]:
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        few = native.supports_linear(input.numel() // self.weight.shape[1])
        if few and all(map(_is_contiguous_float32, parameters)):
            return native.linear(input, *parameters)
    return _forward_by_onednn(self, input)


def _forward_by_onednn(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    if not _is_supported(self, input):
        return _PLAIN(self, input)
    return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")


def _is_supported(layer: nn.Linear, x: torch.Tensor) -> bool:
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    if layer.bias is not None and layer.bias.shape != layer.weight.shape[:1]:  # PyTorch would broadcast it
        return False
    return type(x) is torch.Tensor and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
