"""Attention and set-up of a step of Hogwild! workers (Hogwild! Inference, section 4.4, table 2).

The baseline is FlashAttention of one row over the same total number of tokens.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from hf_parallel.cache import Segment

from . import baselines
from .cases import Bench, Case, Target, figure
from .layer import Features, Layer, hogwild, rotary_of
from .timing import Timer


@dataclass(frozen=True)
class HogwildStage:
    """Cases by workers and unique tokens over all blocks. The extra time of the first layer counts as set-up."""

    share: ClassVar[float] = 0.03

    workers: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (300, 4096, 8192, 16384, 1024, 65536)  # first those of the paper's table
    heads: tuple[int, int, int] = (32, 8, 128)
    dtype: str = "bfloat16"
    layers: int = 4
    steps: int = 40

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations."""
        heads, kv_heads, dim = self.heads
        features = Features(heads, kv_heads, dim, getattr(torch, self.dtype), rotary_of(dim))
        for tokens, workers in itertools.product(self.tokens, self.workers):
            run = partial(self.measure, bench, features, workers, tokens)
            yield Case({"heads": list(self.heads), "workers": workers, "tokens": tokens}, run)

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        workers, long = sorted(self.workers)[len(self.workers) // 2], sorted(self.tokens)[len(self.tokens) // 2]
        by_flash = figure("by_flash", lambda case: case["workers"] == workers and case["tokens"] >= long)
        return [
            Target(f"hogwild, {workers} workers: attention relative to FlashAttention", by_flash, 1.15),
            Target("hogwild: set-up of a step, s", figure("set_up_seconds"), 50e-6),
        ]

    def measure(self, bench: Bench, features: Features, workers: int, tokens: int) -> dict[str, Any]:
        """Measure the attention of one layer, the set-up of a step, and FlashAttention."""
        timer = bench.timer
        layer = Layer(features, timer.device, self.layers)
        segments = hogwild(layer, workers, tokens, spare=2 * self.steps + 8)
        layer.step(segments)
        layer.fill()
        shape = 2, 1, features.kv_heads, tokens, features.head_dim
        keys, values = torch.randn(shape, device=timer.device).to(features.dtype)
        flash = timer.median(lambda: baselines.flash(layer.query[:1], keys, values, features.scale))
        seconds = timer.median(layer.attend)
        moved = tokens * features.bytes_per_token + 2 * layer.query.nbytes
        flops = 4.0 * features.heads * features.head_dim * workers * tokens
        return {
            "seconds": seconds,
            "flash_seconds": flash,
            "by_flash": seconds / flash,
            "of_limit": bench.ceilings.limit(moved, flops) / seconds,
            "set_up_seconds": statistics.median([step_time(layer, segments) for _ in range(4 + self.steps)][4:]),
        }


def step_time(layer: Layer, segments: Sequence[Segment]) -> float:
    """Return the set-up of one decode step: `prepare`, `commit`, and the extra time of the first layer."""
    layer.draw(len(segments))
    Timer(layer.device).synchronize()
    marks = [time.perf_counter()]
    layer.forward = layer.cache.prepare(segments)
    marks.append(time.perf_counter())
    for layer_idx in range(layer.num_layers):
        layer.write(layer_idx)
        layer.attend(layer_idx)
        marks.append(time.perf_counter())
    layer.cache.commit()
    marks.append(time.perf_counter())
    prepare, first, *others, commit = (after - before for before, after in itertools.pairwise(marks))
    return prepare + commit + max(0.0, first - statistics.median(others))
