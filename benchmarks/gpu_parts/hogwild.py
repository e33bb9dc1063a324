"""Stage 4: Hogwild! workers, attention and the set-up of a step (Hogwild! Inference, section 4.4, table 2).

FlashAttention decodes one row over as many tokens as the workers' blocks hold together.
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
"""Seconds in which the host launches a whole step."""


@dataclass(frozen=True)
class HogwildStage:
    """Settings and cases.

    Parameters
    ----------
    workers, tokens : tuple of int
        `tokens` are unique ones, over all blocks.
    heads : (heads, kv_heads, head_dim)
    dtype : str
    layers : int
        Layers of a step whose set-up is measured: what the first takes longer than the others is set-up too.
    steps : int
        Decode steps.
    """

    workers: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    heads: tuple[int, int, int] = (32, 8, 128)
    dtype: str = "bfloat16"
    layers: int = 4
    steps: int = 40

    def cases(self, timer: Timer, ceilings: Ceilings) -> Iterator[Case]:
        """All combinations."""
        heads, kv_heads, dim = self.heads
        features = Features(heads, kv_heads, dim, getattr(torch, self.dtype), rotary_of(dim))
        for tokens, workers in itertools.product(self.tokens, self.workers):
            run = partial(self.measure, timer, ceilings, features, workers, tokens)
            yield Case({"heads": list(self.heads), "workers": workers, "tokens": tokens}, run)

    def measure(
        self, timer: Timer, ceilings: Ceilings, features: Features, workers: int, tokens: int
    ) -> dict[str, Any]:
        """Attention of one layer, set-up of a step, and FlashAttention's decode."""
        layer = Layer(features, timer.device, self.layers)
        segments = hogwild(layer, workers, tokens, room=2 * self.steps + 8)
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
        """Seconds that a step spends outside its layers, on the host and on the device."""
        for _ in range(min(4, self.steps)):
            step_times(timer, layer, segments, _HostClock)
        host = [step_times(timer, layer, segments, _HostClock) for _ in range(self.steps)]
        figures = {
            "set_up_seconds": statistics.median(host),
            "set_up_mean_seconds": statistics.mean(host),
            "set_up_worst_seconds": max(host),
        }
        if timer.is_gpu:
            device = [step_times(timer, layer, segments, _DeviceClock) for _ in range(self.steps)]
            figures["set_up_device_seconds"] = statistics.median(device)
        return figures


class _HostClock:
    """Times of the host."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """Note the time."""
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between the marks."""
        return [after - before for before, after in itertools.pairwise(self._marks)]


class _DeviceClock:
    """Times of the device's queue."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Note the time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Between the marks."""
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in itertools.pairwise(self._marks)]


def step_times(
    timer: Timer, layer: Layer, segments: Sequence[Segment], make_clock: Callable[[], _HostClock | _DeviceClock]
) -> float:
    """Set-up of one decode step: `prepare` and `commit`, and what the first layer takes longer than the others."""
    layer.draw(len(segments))
    timer.synchronize()
    clock = make_clock()
    if isinstance(clock, _DeviceClock):
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
