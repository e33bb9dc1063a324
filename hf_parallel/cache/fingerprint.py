"""Fingerprint of the function that a model computes: architecture, settings, dtype, adapters and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_parallel.cache.placement import execution_device

SAMPLES = 8
"""Number of evenly spaced values that are hashed per parameter or buffer."""


def fingerprint(model: PreTrainedModel, caller: str = "logits_cache") -> str:
    """Return a hash of the function that a model computes.

    The hash covers the class, the config, the active PEFT adapters and some values of every parameter and buffer. It
    changes after training, merging or switching an adapter, but not if only other values change. It does not cover the
    version of transformers, although logits may differ in their last bits between versions; fields that a version adds
    to the config change it. Raises a `ValueError` that names the `caller` if weights are offloaded.
    """
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("transformers_version", None)
    kind = execution_device(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = [type(model).__name__, config, autocast, active_adapters(model)]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    tensors = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"{caller} identifies models by their weights, but {name} is offloaded (meta device)")
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        tensors.append(tensor.detach())
    for (dtype, _), values in _sampled(tensors).items():
        exact = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
        digest.update(values.to(exact).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # the part of this process
    size = tensor.numel()
    step = max(1, size // SAMPLES)
    if type(tensor) is torch.Tensor and tensor.is_contiguous():  # one operation, as models have hundreds of tensors
        return tensor.as_strided((min(SAMPLES, size),), (step,))
    return tensor.reshape(-1)[::step][:SAMPLES]


def sampled_values(model: nn.Module) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
    """Return some values of every floating-point parameter and buffer, as float32; not of offloaded or special ones."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    plain = [t for t in tensors if type(t) is torch.Tensor and not t.is_meta and t.is_floating_point()]
    return {kind: values.float().nan_to_num() for kind, values in _sampled(plain).items()}


def _sampled(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        samples.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor))
    return {kind: torch.cat(values) for kind, values in samples.items()}


def active_adapters(model: nn.Module) -> list[Any]:
    """Return the active and merged adapters of each PEFT layer and their scales; switching them changes no weight."""
    layers: list[Any] = []
    for module in model.modules():  # `hasattr(module, ...)` is slow for most modules
        if "active_adapters" in vars(module) or hasattr(type(module), "active_adapters"):
            layers += [module] if hasattr(module, "merged_adapters") else []
    names = ("active_adapters", "disable_adapters", "scaling", "merged_adapters")
    return [tuple(getattr(layer, name, None) for name in names) for layer in layers]
