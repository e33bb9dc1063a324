"""Integers on their way between the host and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(numbers: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """Integers as `int64 [n]` on a device, without waiting for what a GPU is doing.

    A copy from ordinary memory makes the host wait until the GPU has come to it; one from pinned memory is queued.
    """
    tensor = torch.as_tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ToHost:
    """A tensor that is being copied to the host: reading it waits for what a GPU had been given until now, not longer.

    Parameters
    ----------
    numbers : torch.Tensor
        Of any shape and type; must not be written to before it has been read.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            self._arrived = torch.cuda.current_stream(numbers.device).record_event()

    def tolist(self) -> list[Any]:
        """The numbers, when they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
