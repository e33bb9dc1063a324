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

from hf_parallel.cache.placement import all_modules, execution_device
from hf_parallel.kernels.checksum import checksums

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_RANDOM = re.compile("drop|jitter")
"""Names of settings with which modules make their results random in training."""
_UNUSED = re.compile("classifier|summary")
"""Names of settings of heads that generate nothing."""


def fingerprint(model: PreTrainedModel, caller: str = "") -> str:
    """Return a hash of the function that a model computes.

    The hash covers the class, the config, the active PEFT adapters, active dropout, and all bytes of every parameter
    and buffer, except for frequencies that a forward pass has set. The parts of quantized tensors count, too. Equal
    models have equal fingerprints, in any memory layout and on any device; of a `DTensor`, only the part of this
    process counts. It does not cover hooks, nor the version of transformers, although logits may differ in their last
    bits between versions; fields that a version adds to the config change it. Raises a `ValueError` that names the
    `caller` if weights are offloaded; without a caller, their values do not count.
    """
    if caller:
        require_present(model, caller)
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("transformers_version", None)
    kind = execution_device(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = [type(model).__name__, config, autocast, active_adapters(model), active_dropout(model)]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    parts: list[tuple[str, torch.Tensor]] = []
    for name, tensor in (*model.named_parameters(), *_lasting_buffers(model)):
        parts += _parts(name, tensor)
    present = [tensor for _, tensor in parts if not tensor.is_meta]
    for name, tensor in parts:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{tensor.is_meta}".encode())
    for checksum in checksums(present):
        digest.update(checksum)
    return digest.hexdigest()


def require_present(model: nn.Module, caller: str) -> None:
    """Raise a `ValueError` that names the `caller` if weights are offloaded."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{caller} identifies models by their weights, but {name} is offloaded (meta device)")


def _lasting_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's buffers by name, without RoPE frequencies that a forward pass has set."""
    frequencies: dict[str, torch.Tensor | None] = {}
    for path, module in model.named_modules():
        frequencies.update(_dynamic_rope(path, module))
    for name, buffer in model.named_buffers():
        if name not in frequencies:
            yield name, buffer
    for name, frequency in frequencies.items():
        if frequency is not None:
            yield name, frequency


def _dynamic_rope(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield names of a module's dynamic RoPE frequencies, with those from which passes start; None: derived from these.

    Passes over long texts replace frequencies (`transformers.modeling_rope_utils.dynamic_rope_update`), and may leave
    two names for one buffer. A module that serves several types of layers has frequencies for each.
    """
    rope_types = getattr(module, "rope_type", None)
    kinds = rope_types if isinstance(rope_types, dict) else {"": rope_types}
    for kind, rope_type in kinds.items():
        prefix = f"{kind}_" if kind else ""
        original = getattr(module, f"{prefix}original_inv_freq", None)
        if original is None or rope_type not in ("dynamic", "longrope"):
            continue
        current = getattr(module, f"{prefix}inv_freq")
        length = getattr(module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", 0))
        limit: Any = module.original_max_seq_len
        is_set = rope_type == "longrope" or bool(length > limit)
        start = f"{path}.{prefix}" if path else prefix
        yield f"{start}inv_freq", original if is_set else current
        yield f"{start}original_inv_freq", original
        yield f"{start}long_inv_freq", None


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors in a parameter or buffer, with names that hold its other properties."""
    if isinstance(tensor, DTensor):
        yield from _parts(name, tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):
        inner_names, properties = tensor.__tensor_flatten__()
        description = re.sub(r" at 0x[0-9a-f]+", "", f"{type(tensor).__name__} {properties}")
        for inner in inner_names:
            yield from _parts(f"{name}.{inner} {description}", getattr(tensor, inner))
    elif tensor.layout != torch.strided:
        yield name, tensor.to_dense()
    else:
        plain = tensor
        if type(tensor) not in _PLAIN:
            plain = tensor.detach().as_subclass(torch.Tensor)
        yield name, plain
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
    adapters: list[object] = []
    for layer in adapter_layers(model):
        adapters.append(tuple(getattr(layer, name, None) for name in names))
    return adapters


def adapter_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model that PEFT has replaced by layers with adapters."""
    layers = []
    for module in dict.fromkeys(all_modules(model)):
        # `hasattr(module, ...)` is slow for most modules
        has_adapters = "active_adapters" in vars(module) or hasattr(type(module), "active_adapters")
        if has_adapters and hasattr(module, "merged_adapters"):
            layers.append(module)
    return layers


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
    is_named_random = _RANDOM.search(type(module).__name__.lower()) is not None
    if is_named_random and any(name in vars(module) for name in names):
        return True
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    used = () if code is None else code.co_names
    if "dropout" not in used or hasattr(module, "dropout"):
        return False
    return sum("drop" in name for name in used) == 1  # `F.dropout` with a constant: no other name says dropout
