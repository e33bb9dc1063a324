"""What tells a model's logits from another's: its architecture, settings, dtype, adapters, and what its weights are."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel

SAMPLES = 8
"""Values of each weight that are looked at."""


def fingerprint(model: PreTrainedModel, asker: str = "logits_cache") -> str:
    """A name for what a model computes.

    Evenly spaced values of every parameter and buffer go into it, so that training, merging or switching an adapter
    gives another one; a change to none of those values does not. Adapters of PEFT count as they are switched now. The
    version of transformers does not count, though another one may compute logits that differ in their last bits; fields
    that it adds to a config do.

    Parameters
    ----------
    model : PreTrainedModel
    asker : str
        Who needs the name, for the error.

    Raises
    ------
    ValueError
        If a weight cannot be read because it is offloaded.
    """
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("transformers_version", None)
    kind = model.device.type
    computes = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    told = [type(model).__name__, config, computes, _adapters(model)]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    names = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"{asker} tells models by their weights, but {name} is offloaded (meta device)")
        names.append(f"{name}{tuple(tensor.shape)}{tensor.dtype}")
        samples.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor.detach()))
    digest.update("".join(names).encode())
    for (dtype, _), values in samples.items():
        together = torch.cat(values)
        exact = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
        digest.update(together.to(exact).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to `SAMPLES` of a tensor's values, evenly spaced; of hundreds of tensors, so in one step where that goes."""
    size = tensor.numel()
    step = max(1, size // SAMPLES)
    if type(tensor) is torch.Tensor and tensor.is_contiguous():
        return tensor.as_strided((min(SAMPLES, size),), (step,))
    return tensor.reshape(-1)[::step][:SAMPLES]


def _adapters(model: PreTrainedModel) -> list[Any]:
    """Which adapters each layer of PEFT uses, and how strongly: no weight changes where they are switched."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if "active_adapters" in vars(module) or hasattr(type(module), "active_adapters")  # `hasattr(module)` is slow
    ]
    return [
        (layer.active_adapters, layer.disable_adapters, getattr(layer, "scaling", None))
        for layer in layers
        if hasattr(layer, "merged_adapters")
    ]
