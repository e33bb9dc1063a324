"""What tells a model's logits from another's: its architecture, settings, dtype, adapters, and what its weights are."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel

SAMPLES = 8
"""Values of each weight that are looked at."""


def fingerprint(model: PreTrainedModel) -> str:
    """A name for what a model computes.

    Evenly spaced values of every parameter and buffer go into it, so that training, merging or switching an adapter
    gives another one; a change to none of those values does not.
    """
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    adapters: Any = getattr(model, "active_adapters", None)
    try:
        active = list(adapters() if callable(adapters) else adapters or [])
    except ValueError:  # of a model without adapters
        active = []
    digest = hashlib.sha256(json.dumps([type(model).__name__, config, active], sort_keys=True, default=str).encode())
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLES)
        samples.setdefault((tensor.dtype, tensor.device), []).append(flat[::step][:SAMPLES])
    for (dtype, _), values in samples.items():
        together = torch.cat(values)
        exact = together.double() if dtype.is_floating_point else together.long()
        digest.update(exact.cpu().numpy().tobytes())
    return digest.hexdigest()
