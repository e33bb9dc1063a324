"""Fingerprint of the function that a model computes: architecture, settings, dtype, adapters, dropout and weights."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_parallel.cache.placement import execution_device
from hf_parallel.kernels.checksum import checksums

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_RANDOM = re.compile("drop|jitter")
"""Names of settings with which modules make their results random in training."""
_UNUSED = re.compile("classifier|summary")
"""Names of settings of heads that generate nothing."""


def fingerprint(model: PreTrainedModel, caller: str = "") -> str:
    """Return a hash of the function that a model computes.

    The hash covers the class, the config, the active PEFT adapters, active dropout, and all bytes of every parameter
    and buffer. The parts of quantized tensors count, too. Equal models have equal fingerprints, in any
    memory layout and on any device; of a `DTensor`, only the part of this process counts. It does not cover hooks, nor
    the version of transformers, although logits may differ in their last bits between versions; fields that a version
    adds to the config change it. Raises a `ValueError` that names the `caller` if weights are offloaded; without a
    caller, their values do not count.
    """
    if caller:
        require_present(model, caller)
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("transformers_version", None)
    kind = execution_device(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = [type(model).__name__, config, autocast, active_adapters(model), active_dropout(model)]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    found = [part for name, one in (*model.named_parameters(), *model.named_buffers()) for part in _parts(name, one)]
    present = [tensor for _, tensor in found if not tensor.is_meta]
    for name, tensor in found:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{tensor.is_meta}".encode())
    for checksum in checksums(present):
        digest.update(checksum)
    return digest.hexdigest()


def require_present(model: nn.Module, caller: str) -> None:
    """Raise a `ValueError` that names the `caller` if weights are offloaded."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{caller} identifies models by their weights, but {name} is offloaded (meta device)")


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors in a parameter or buffer, with names that hold its other properties."""
    if isinstance(tensor, DTensor):
        yield from _parts(name, tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):
        names, rest = tensor.__tensor_flatten__()
        shown = re.sub(r" at 0x[0-9a-f]+", "", f"{type(tensor).__name__} {rest}")
        for inner in names:
            yield from _parts(f"{name}.{inner} {shown}", getattr(tensor, inner))
    elif tensor.layout != torch.strided:
        yield name, tensor.to_dense()
    else:
        yield name, tensor if type(tensor) in _PLAIN else tensor.detach().as_subclass(torch.Tensor)
        yield from _of_state(f"{name}.quant_state", getattr(tensor, "quant_state", None))


def _of_state(name: str, state: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the quantization state of a bitsandbytes parameter, and of the state nested in it."""
    for key, value in sorted(getattr(state, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor):
            yield f"{name}.{key}", value
        elif hasattr(value, "__dict__"):
            yield from _of_state(f"{name}.{key}", value)


def active_adapters(model: nn.Module) -> list[object]:
    """Return the active and merged adapters of each PEFT layer and their scales; switching them changes no weight."""
    names = ("active_adapters", "disable_adapters", "scaling", "merged_adapters")
    return [tuple(getattr(layer, name, None) for name in names) for layer in adapter_layers(model)]


def adapter_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model that PEFT has replaced by layers with adapters."""
    # `hasattr(module, ...)` is slow for most modules
    found = (one for one in model.modules() if "active_adapters" in vars(one) or hasattr(type(one), "active_adapters"))
    return [layer for layer in found if hasattr(layer, "merged_adapters")]


def active_dropout(model: nn.Module) -> list[str]:
    """Return the names of modules in training mode whose results are random, or depend on the other rows of a batch.

    These are dropout modules, modules and configs with positive settings of dropout or jitter, functional dropout, and
    batch normalization.
    """
    return [name for name, module in model.named_modules() if module.training and _is_random(module)]


def _is_random(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.RReLU)):
        return True
    settings = {**getattr(getattr(module, "config", None), "__dict__", {}), **vars(module)}
    names = [name for name, value in settings.items() if isinstance(value, float | int) and 0 < value < 1]
    if any(_RANDOM.search(name) and not _UNUSED.search(name) for name in names):
        return True
    if _RANDOM.search(type(module).__name__.lower()) and any(name in vars(module) for name in names):
        return True
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    used = () if code is None else code.co_names  # `F.dropout` with a constant: no other name says dropout
    return "dropout" in used and not hasattr(module, "dropout") and sum("drop" in name for name in used) == 1
