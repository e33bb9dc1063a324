"""Asynchronous copies between the CPU and a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch


def to_device(
    numbers: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return numbers as a tensor `[n]` on a device, without waiting for queued GPU work.

    The copy goes through pinned memory: a copy from pageable memory would wait for all GPU work queued before it.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class HostCopy:
    """Asynchronous copy of a tensor to host memory. Reading it waits only for GPU work queued before the copy.

    The source, of any shape and dtype, must not be written to before the copy has been read.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._copy = source
        self._done: torch.cuda.Event | None = None
        if source.is_cuda:
            self._copy = source.to("cpu", non_blocking=True)  # into pinned memory
            self._done = torch.cuda.current_stream(source.device).record_event()

    @cached_property
    def values(self) -> list[Any]:
        """The values as nested lists. Waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
