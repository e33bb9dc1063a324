"""Times on a device: medians of CUDA events over a cold L2, the device's own ceilings, and a limit on all of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSHED_BYTES = 256 << 20
"""Written before every measured run: several times the L2 of any GPU."""
CYCLES_PER_SECOND = 2e9
"""What a GPU's clock hardly exceeds: a sleep of so many cycles takes its second or longer."""
LONGEST_LEAD = 0.02
"""Seconds that a GPU is kept waiting at most while what is measured is put into its queue."""


class OutOfTimeError(Exception):
    """The time for a stage is over."""


class Deadline:
    """The moment at which a stage must end, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds that remain; negative when it is over."""
        return self._at - time.perf_counter()

    def check(self, *_: object) -> None:
        """Raise `OutOfTimeError` when it is over."""
        if self.left <= 0:
            raise OutOfTimeError


@dataclass(frozen=True, eq=False)
class Timer:
    """Measures what runs on a device.

    On a GPU each run is timed by two events. L2 is flushed before, as a layer's keys are not in it when their turn
    comes; then the GPU sleeps until all launches are in its queue, so that the time is the kernels' and not the host's.

    Parameters
    ----------
    device : torch.device
    at_least, at_most : int
        Runs of which the median is taken.
    seconds : float
        Time after which no further run is begun.
    """

    device: torch.device
    at_least: int = 5
    at_most: int = 50
    seconds: float = 0.25

    def median(self, run: Callable[[], object]) -> float:
        """Median seconds of `run()`, after one run that warms up."""
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
        """Whether there are events to time with."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def queue_ahead(self, lead: float) -> None:
        """Keep a GPU waiting for `lead` seconds, in which the host can launch what follows; flush its L2."""
        if self.is_gpu:
            torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=self.device).zero_()
            torch.cuda._sleep(int(lead * CYCLES_PER_SECOND))

    def _on_gpu(self, run: Callable[[], object], lead: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.queue_ahead(lead)
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
    """What the device can do at best.

    Attributes
    ----------
    bytes_per_second : float
        Of a large copy, bytes read and bytes written both counted.
    flops_per_second : float
        Of a large square matrix product of random numbers.
    """

    bytes_per_second: float
    flops_per_second: float

    def limit(self, num_bytes: float, flops: float = 0.0) -> float:
        """Seconds that moving `num_bytes` and computing `flops` take at least."""
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
