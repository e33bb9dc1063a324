"""Integers on their way from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(numbers: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """Integers as `int64 [n]` on a device, without waiting for what a GPU is doing.

    A copy from ordinary memory makes the host wait until the GPU has come to it; one from pinned memory is queued.
    """
    tensor = torch.as_tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
