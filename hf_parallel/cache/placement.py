"""Device on which a model computes, which accelerate's offloading separates from that of its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def execution_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first weight or, if it is offloaded, that on which accelerate's hooks compute.

    Raises `ValueError` if the weight is on the meta device and no hook loads it.
    """
    weight = next(model.parameters(), None)
    if weight is None:
        return torch.device("cpu")
    if not weight.is_meta:
        return weight.device
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    raise ValueError(f"{type(model).__name__} is on the meta device: load its weights first")


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, in a fraction of the time of `modules` and `parameters`, which join names."""
    modules = [model]
    for module in modules:
        modules.extend(child for child in module._modules.values() if child is not None)
    return modules


def weight_devices(model: nn.Module) -> set[torch.device]:
    """Return the devices of a model's weights; the meta device for offloaded ones."""
    weights = (weight for module in all_modules(model) for weight in module._parameters.values())
    return {weight.device for weight in weights if weight is not None}


def cpu_as_default() -> AbstractContextManager[object]:
    """Create tensors without a device on the CPU, whatever default device the caller has set."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
