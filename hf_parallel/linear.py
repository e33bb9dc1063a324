"""How a model's linear layers meet oneDNN, on a host in float32.

PyTorch gives these products to MKL and keeps oneDNN, which it brings along, for other types. A decode step waits for
weights to be read, so a few rows, or a draft, should cost little more than one token. By MKL they take twice as long as
that on the CPUs that this was measured on; oneDNN comes closer, and is faster at any length (docs/kernels.md has the
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


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Let oneDNN compute a model's large linear layers of float32 weights on a host.

    Results differ from PyTorch's in the last bits, as those of other batch sizes do. Layers whose `forward` somebody
    has replaced stay as they are, and whatever needs gradients is PyTorch's.

    Raises
    ------
    ValueError
        If `HF_PARALLEL_LINEAR` names no library, or one that this PyTorch has not.
    """
    layers = [module for module in model.modules() if _serves(module)] if _wanted() else []
    try:
        for layer in layers:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _wanted() -> bool:
    return _select(os.environ.get(LINEAR_VARIABLE, "")) and not torch.is_autocast_enabled("cpu")


@cache
def _select(asked: str) -> bool:
    """Whether oneDNN serves."""
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


def _forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """As `nn.Linear.forward`."""
    if type(x) is not torch.Tensor or x.dtype != torch.float32 or not x.numel() or torch.is_grad_enabled():
        return nn.Linear.forward(self, x)
    return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
