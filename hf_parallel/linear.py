"""How a model's linear layers meet oneDNN, on a host in float32.

PyTorch gives these products to MKL and keeps oneDNN, which it brings along, for other types. A decode step waits for
weights to be read, so a few rows, or a draft, should cost little more than one token. By MKL they take twice as long as
that on the CPUs that this was measured on; oneDNN comes closer, and is faster at any length (docs/cpu.md has the
figures). `HF_PARALLEL_LINEAR=torch` leaves the layers to PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType

import torch
from torch import nn

LINEAR_VARIABLE = "HF_PARALLEL_LINEAR"
LEAST_WEIGHTS = 1 << 16
"""Weights of a layer below which the choice does not matter."""

_NAMES = ("onednn", "torch")
_PLAIN = nn.Linear.forward


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Let oneDNN compute a model's large linear layers of float32 weights on a host.

    Results differ from PyTorch's in the last bits, as those of other batch sizes do. Layers whose `forward` somebody
    has replaced stay as they are, and what needs gradients, or runs under autocast, is PyTorch's. Other threads that
    use the model meanwhile use the same layers.

    Raises
    ------
    ValueError
        If `HF_PARALLEL_LINEAR` names no library, or one that this PyTorch has not.
    """
    layers = [module for module in model.modules() if _serves(module)] if _wanted() else []
    replaced = [(layer, MethodType(_forward, layer)) for layer in layers]
    try:
        for layer, forward in replaced:
            layer.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for layer, forward in replaced:
            if vars(layer).get("forward") is forward:  # not what somebody has put in its place
                del layer.forward


def _wanted() -> bool:
    untouched = bool(torch.backends.mkldnn.enabled) and nn.Linear.forward is _PLAIN
    return _asked_for(os.environ.get(LINEAR_VARIABLE, "")) and untouched


@cache
def _asked_for(asked: str) -> bool:
    """Whether a value of the variable means oneDNN, on this PyTorch."""
    if asked not in ("", *_NAMES):
        raise ValueError(f"{LINEAR_VARIABLE} must be one of {list(_NAMES)}, got {asked!r}")
    has = torch.backends.mkldnn.is_available()
    if asked == "onednn" and not has:
        raise ValueError(f"{LINEAR_VARIABLE}=onednn cannot be used: this PyTorch was built without it")
    # Where PyTorch has no MKL, on ARM, its own choice was not measured.
    return has and (asked == "onednn" or (not asked and torch.backends.mkl.is_available()))


def _serves(module: nn.Module) -> bool:
    """Whether oneDNN computes a module: a large plain linear layer."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.numel() >= LEAST_WEIGHTS
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
    """As `nn.Linear.forward`."""
    if _is_plain(input):
        return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
    return _PLAIN(self, input)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether oneDNN may compute a layer of an input, here and now."""
    return (
        type(x) is torch.Tensor
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
