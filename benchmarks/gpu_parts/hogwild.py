"""Attention and set-up of a step of Hogwild! workers (Hogwild! Inference, section 4.4, table 2).

The baseline is FlashAttention of one row over the same total number of tokens.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_parallel.cache import Segment

from . import baselines
from .cases import Case
from .layer import Features, Layer, hogwild, rotary_of
from .timing import Ceilings, Timer

LEAD = 0.01
"""Seconds that the GPU sleeps first, so that the CPU can launch a whole step."""


@dataclass(frozen=True)
class HogwildStage:
    """Settings and cases.

    Parameters
    ----------
    workers, tokens : tuple of int
        Numbers of workers, and of unique tokens over all blocks.
    heads : (heads, kv_heads, head_dim)
    dtype : str
    layers : int
        Number of layers. The extra time of the first layer counts as set-up.
    steps : int
        Number of decode steps.
    """

    workers: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    heads: tuple[int, int, int] = (32, 8, 128)
    dtype: str = "bfloat16"
    layers: int = 4
    steps: int = 40

    def cases(self, timer: Timer, ceilings: Ceilings) -> Iterator[Case]:
        """Yield all combinations."""
        heads, kv_heads, dim = self.heads
        features = Features(heads, kv_heads, dim, getattr(torch, self.dtype), rotary_of(dim))
        for tokens, workers in itertools.product(self.tokens, self.workers):
            run = partial(self.measure, timer, ceilings, features, workers, tokens)
            yield Case({"heads": list(self.heads), "workers": workers, "tokens": tokens}, run)

    def measure(
        self, timer: Timer, ceilings: Ceilings, features: Features, workers: int, tokens: int
    ) -> dict[str, Any]:
        """Measure the attention of one layer, the set-up of a step, and FlashAttention."""
        layer = Layer(features, timer.device, self.layers)
        segments = hogwild(layer, workers, tokens, spare=2 * self.steps + 8)
        layer.step(segments)
        layer.fill()
        keys, values = torch.randn(2, 1, features.kv_heads, tokens, features.head_dim, device=timer.device).to(
            features.dtype
        )
        query = layer.query[:1]
        flash = timer.median(lambda: baselines.flash(query, keys, values, features.scale))
        seconds = timer.median(layer.attend)
        moved = tokens * features.bytes_per_token + 2 * layer.query.nbytes
        flops = 4.0 * features.heads * features.head_dim * workers * tokens
        return {
            "seconds": seconds,
            "flash_seconds": flash,
            "by_flash": seconds / flash,
            "of_limit": ceilings.limit(moved, flops) / seconds,
            **self._set_up(timer, layer, segments),
        }

    def _set_up(self, timer: Timer, layer: Layer, segments: Sequence[Segment]) -> dict[str, Any]:
        """Measure the time of a step outside its layers, on the CPU and on the GPU."""
        for _ in range(min(4, self.steps)):
            step_times(timer, layer, segments, CpuClock)
        host = [step_times(timer, layer, segments, CpuClock) for _ in range(self.steps)]
        figures = {
            "set_up_seconds": statistics.median(host),
            "set_up_mean_seconds": statistics.mean(host),
            "set_up_worst_seconds": max(host),
        }
        if timer.is_gpu:
            device = [step_times(timer, layer, segments, GpuClock) for _ in range(self.steps)]
            figures["set_up_device_seconds"] = statistics.median(device)
        return figures


class CpuClock:
    """Clock that records CPU times."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """Record the time."""
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between the marks."""
        return [after - before for before, after in itertools.pairwise(self._marks)]


class GpuClock:
    """Clock that records CUDA events on the current stream."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Record the time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between the marks."""
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in itertools.pairwise(self._marks)]


def step_times(
    timer: Timer, layer: Layer, segments: Sequence[Segment], make_clock: Callable[[], CpuClock | GpuClock]
) -> float:
    """Return the set-up of one decode step: `prepare`, `commit`, and the extra time of the first layer."""
    layer.draw(len(segments))
    timer.synchronize()
    clock = make_clock()
    if isinstance(clock, GpuClock):
        timer.queue_ahead(LEAD)
    clock.mark()
    layer.forward = layer.cache.prepare(segments)
    clock.mark()
    for layer_idx in range(layer.num_layers):
        layer.write(layer_idx)
        layer.attend(layer_idx)
        clock.mark()
    layer.cache.commit()
    clock.mark()
    prepare, first, *others, commit = clock.seconds()
    return prepare + commit + max(0.0, first - statistics.median(others))
