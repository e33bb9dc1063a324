"""Timing on a device: medians of CUDA events with a cold L2, limits of the hardware, deadlines, and peak memory."""

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
        self._device = device if device.type == "cuda" else None
        if self._device:
            self._before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def figures(self) -> dict[str, int]:
        """Return `peak_bytes`; nothing on other devices."""
        return {"peak_bytes": torch.cuda.max_memory_allocated(self._device) - self._before} if self._device else {}


@dataclass(frozen=True, eq=False)
class Timer:
    """Measures the time of calls on a device: the median of `at_least` to `at_most` runs, in about `seconds`.

    On a GPU, two events time each run. L2 is flushed before, because in a model the keys of a layer are not in it
    either. Then the GPU sleeps until all launches are in its queue, so that launch overhead is not measured.
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
            times.append(self._by_events(run, lead) if self.device.type == "cuda" else self.once(run))
        return statistics.median(times)

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run on an idle device, with its launches."""
        self.synchronize()
        began = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _by_events(self, run: Callable[[], object], lead: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=self.device).zero_()
        torch.cuda._sleep(int(lead * CYCLES_PER_SECOND))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


@dataclass(frozen=True)
class Ceilings:
    """Limits of the hardware: of a large copy, counting reads and writes, and of a large product of random matrices."""

    bytes_per_second: float
    flops_per_second: float

    def limit(self, num_bytes: float, flops: float = 0.0) -> float:
        """Return the minimum seconds to move `num_bytes` and compute `flops`."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_ceilings(timer: Timer, copied_bytes: int, size: int, dtype: torch.dtype) -> Ceilings:
    """Measure a copy of `copied_bytes` and a product of two square matrices."""
    source = torch.empty(copied_bytes // dtype.itemsize, dtype=dtype, device=timer.device).normal_()
    target = torch.empty_like(source)
    copying = timer.median(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, dtype=dtype, device=timer.device) for _ in range(2))
    return Ceilings(2 * copied_bytes / copying, 2 * size**3 / timer.median(lambda: a @ b))
