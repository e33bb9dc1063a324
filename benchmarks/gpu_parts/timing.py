"""Timing on a device: medians of CUDA events with a cold L2, limits of the hardware, and deadlines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSHED_BYTES = 256 << 20
"""Bytes written before every measured run: several times the L2 of any GPU."""
CYCLES_PER_SECOND = 2e9
"""Upper bound of a GPU clock: a sleep of this many cycles takes at least a second."""
LONGEST_LEAD = 0.02
"""Maximum seconds for which a GPU sleeps while the CPU fills its queue."""


class OutOfTimeError(Exception):
    """Raised when the time of a stage is over."""


class Deadline:
    """Deadline of a stage, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds; negative after the deadline."""
        return self._at - time.perf_counter()

    def check(self, *_: object) -> None:
        """Raise `OutOfTimeError` after the deadline."""
        if self.left <= 0:
            raise OutOfTimeError


class PeakMemory:
    """Measures the memory that a GPU allocates at most from now on, beyond what is allocated now."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0
        if device.type == "cuda":
            self._before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def figures(self) -> dict[str, int]:
        """Return `peak_bytes`; nothing on other devices."""
        if self._device.type != "cuda":
            return {}
        return {"peak_bytes": torch.cuda.max_memory_allocated(self._device) - self._before}


@dataclass(frozen=True, eq=False)
class Timer:
    """Measures the time of calls on a device.

    On a GPU, two events time each run. L2 is flushed before, because in a model the keys of a layer are not in it
    either. Then the GPU sleeps until all launches are in its queue, so that launch overhead is not measured.

    Parameters
    ----------
    device : torch.device
    at_least, at_most : int
        Number of runs per median.
    seconds : float
        Time after which no further run starts.
    """

    device: torch.device
    at_least: int = 5
    at_most: int = 50
    seconds: float = 0.25

    def median(self, run: Callable[[], object]) -> float:
        """Return the median seconds of `run()`, after a warm-up."""
        run()
        self.synchronize()
        began = time.perf_counter()
        run()
        lead = min(2 * (time.perf_counter() - began) + 1e-4, LONGEST_LEAD)
        self.synchronize()
        times: list[float] = []
        limit = Deadline(self.seconds)
        while len(times) < self.at_least or (len(times) < self.at_most and limit.left > 0):
            times.append(self._on_gpu(run, lead) if self.is_gpu else self._on_host(run))
        return statistics.median(times)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, which times with events."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def _on_gpu(self, run: Callable[[], object], lead: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=self.device).zero_()
        torch.cuda._sleep(int(lead * CYCLES_PER_SECOND))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    @staticmethod
    def _on_host(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began


@dataclass(frozen=True)
class Ceilings:
    """Limits of the hardware.

    Attributes
    ----------
    bytes_per_second : float
        Bandwidth of a large copy, counting reads and writes.
    flops_per_second : float
        Rate of a large square matrix product of random numbers.
    """

    bytes_per_second: float
    flops_per_second: float

    def limit(self, num_bytes: float, flops: float = 0.0) -> float:
        """Return the minimum seconds to move `num_bytes` and compute `flops`."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_ceilings(timer: Timer, copied_bytes: int, matrix_size: int, dtype: torch.dtype) -> Ceilings:
    """Measure a copy of `copied_bytes` and a product of two square matrices."""
    return Ceilings(
        2 * copied_bytes / _copy_seconds(timer, copied_bytes, dtype),
        2 * matrix_size**3 / _product_seconds(timer, matrix_size, dtype),
    )


def _copy_seconds(timer: Timer, copied_bytes: int, dtype: torch.dtype) -> float:
    source = torch.empty(copied_bytes // dtype.itemsize, dtype=dtype, device=timer.device).normal_()
    target = torch.empty_like(source)
    return timer.median(lambda: target.copy_(source))


def _product_seconds(timer: Timer, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, dtype=dtype, device=timer.device) for _ in range(2))
    return timer.median(lambda: a @ b)
