"""By what a model's linear layers are computed, on a host in float32.

A decode step waits for weights to be read, so a few rows, or a draft, should cost little more than one token. By MKL,
to which PyTorch gives these products, they take up to twice as long as that on the CPUs that this was measured on. So
few tokens go to a kernel of our own, and more of them to oneDNN, which PyTorch brings along and keeps for other types
(docs/cpu.md has the figures). `HF_PARALLEL_LINEAR=torch` leaves the layers to PyTorch.
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

from hf_parallel.kernels import native

LINEAR_VARIABLE = "HF_PARALLEL_LINEAR"
LEAST_WEIGHTS = 1 << 16
"""Weights of a layer below which the choice does not matter."""

_PASSES: dict[str, dict[int, float]] = {
    "native": {1: 1.0, 8: 1.0, 16: 1.68, 32: 2.3, 128: 5.6},
    "onednn": {1: 1.0, 2: 1.36, 8: 1.4, 16: 1.62, 32: 1.84, 128: 4.2},
    "torch": {1: 1.0, 2: 1.5, 8: 1.5, 16: 1.77, 32: 2.2, 128: 5.3},
}
"""By what computes the layers: how long a forward pass takes by its tokens, in passes of a single token, as measured in
float32 on an AMD EPYC (docs/cpu.md), but that up to eight tokens of the kernel, 1.1 there, are told as free."""
_NAMES = tuple(_PASSES)
_PLAIN = nn.Linear.forward


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Let a kernel of our own and oneDNN compute a model's large linear layers of float32 weights on a host.

    Results differ from PyTorch's in the last bits, as those of other batch sizes do. Layers whose `forward` somebody
    has replaced stay as they are, and what needs gradients, or runs under autocast, is PyTorch's. Other threads that
    use the model meanwhile use the same layers.

    Raises
    ------
    ValueError
        If `HF_PARALLEL_LINEAR` names no library, or one that this PyTorch has not.
    """
    by = _wanted()
    replaced = [] if by is None else [(layer, MethodType(by, layer)) for layer in model.modules() if _serves(layer)]
    try:
        for layer, forward in replaced:
            layer.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for layer, forward in replaced:
            if vars(layer).get("forward") is forward:  # not what somebody has put in its place
                del layer.forward


def computed_by(model: PreTrainedModel) -> str:
    """What computes passes of few tokens of a model during a call: `native`, `onednn` or `torch`.

    It is asked for the costs of passes, which are known of float32 alone: of other types PyTorch's are told.
    """
    by = _wanted()
    if by is None or model.dtype != torch.float32 or model.device.type != "cpu":
        return "torch"
    return "native" if by is _forward and native.serves_linear(1) else "onednn"


@cache
def pass_cost(tokens: int, computed_by: str) -> float:
    """How long a pass of so many tokens takes, in passes of a single one, by what it is computed."""
    known = _PASSES[computed_by]
    longest = max(known)
    return float(np.interp(tokens, list(known), list(known.values()))) * max(1.0, tokens / longest)


def _wanted() -> Callable[..., torch.Tensor] | None:
    """What takes the place of layers' `forward`, if anything is to."""
    library = _library(os.environ.get(LINEAR_VARIABLE, ""))
    if library == "torch" or not torch.backends.mkldnn.enabled or nn.Linear.forward is not _PLAIN:
        return None
    return _forward if library == "native" else _forward_by_onednn


@cache
def _library(asked: str) -> str:
    """What a value of the variable means here: one of `_NAMES`."""
    if asked not in ("", *_NAMES):
        raise ValueError(f"{LINEAR_VARIABLE} must be one of {list(_NAMES)}, got {asked!r}")
    has = torch.backends.mkldnn.is_available()
    if asked in ("native", "onednn") and not has:
        raise ValueError(f"{LINEAR_VARIABLE}={asked} cannot be used: this PyTorch was built without oneDNN")
    if asked == "native" and (reason := native.why_not()):
        raise ValueError(f"{LINEAR_VARIABLE}=native cannot be used: {reason}")
    # Where PyTorch has no MKL, on ARM, its own choice was not measured.
    return asked or ("native" if has and torch.backends.mkl.is_available() else "torch")


def _serves(module: nn.Module) -> bool:
    """Whether a module is computed so: a large plain linear layer."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.numel() >= LEAST_WEIGHTS and _lies_plainly(weight)


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
    """`nn.Linear.forward`, few tokens by the kernel and more by oneDNN."""
    if not _is_plain(self, input):
        return _PLAIN(self, input)
    weight, bias = self.weight, self.bias
    inputs = weight.shape[1]
    fits = input.shape[-1:] == (inputs,) and native.serves_linear(input.numel() // inputs)
    if fits and _lies_plainly(weight) and (bias is None or _lies_plainly(bias)):
        return native.linear(input, weight, bias)
    return _by_onednn(self, input)


def _lies_plainly(parameter: torch.Tensor) -> bool:
    """Whether memory can be read as its values."""
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()


def _forward_by_onednn(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """`nn.Linear.forward`, all by oneDNN."""
    return _by_onednn(self, input) if _is_plain(self, input) else _PLAIN(self, input)


def _by_onednn(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")


def _is_plain(layer: nn.Linear, x: torch.Tensor) -> bool:
    """Whether a layer of an input may be computed so, here and now."""
    bias = layer.bias
    return (
        type(x) is torch.Tensor
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and (bias is None or bias.shape == layer.weight.shape[:1])  # PyTorch takes one for all outputs, too
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
