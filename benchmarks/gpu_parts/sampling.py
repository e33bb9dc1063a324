"""Sampling of the next token of rows from their logits, compared with PyTorch's operations in the same run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import Sampled, Sampler, SamplingBatch, SamplingTask
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.kernels import BACKEND_VARIABLE

from .cases import Bench, Case, Target, figure
from .timing import Timer

GREEDY = "greedy"
WAYS: dict[str, Any] = {
    GREEDY: [],
    "temperature": [TemperatureLogitsWarper(0.8)],
    "seeded": [TemperatureLogitsWarper(0.8)],
    "top_k, top_p": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.95)],
    "top_p": [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)],
    "seeded top_p": [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)],
}
"""Warpers of each way to sample."""


@dataclass(frozen=True)
class SamplingStage:
    """Cases by rows, and by standard deviation of the logits: of a random model (uncertain) and of a trained one."""

    share: ClassVar[float] = 0.04

    rows: tuple[int, ...] = (1, 8, 128, 1024)
    vocabulary: int = 151_936
    spreads: tuple[float, ...] = (1.3, 4.0)
    dtype: str = "bfloat16"

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations."""
        greedy: dict[tuple[int, float], float] = {}
        for rows, spread, way in itertools.product(self.rows, self.spreads, WAYS):
            run = partial(self.measure, bench.timer, greedy, rows, spread, way)
            yield Case({"rows": rows, "spread": spread, "way": way}, run)

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        return [Target("sampling, most rows: ms more than greedy", figure("ms_over_greedy"), 2.8)]

    def measure(
        self, timer: Timer, greedy: dict[tuple[int, float], float], rows: int, spread: float, way: str
    ) -> dict[str, Any]:
        """Measure sampling with and without the kernels, and compare the tokens."""
        logits = torch.randn(rows, self.vocabulary, device=timer.device).mul_(spread).to(getattr(torch, self.dtype))
        backend = os.environ.get(BACKEND_VARIABLE, "")
        seconds, tokens = self._sample(timer, logits, way, backend)
        torch_seconds, expected = self._sample(timer, logits, way, "torch")
        figures = {
            "seconds": seconds,
            "torch_seconds": torch_seconds,
            "by_torch": seconds / torch_seconds,
            "same_tokens": float((tokens == expected).float().mean()),
        }
        if way == GREEDY:
            greedy[rows, spread] = seconds
        elif rows == max(self.rows) and (rows, spread) in greedy:
            figures["ms_over_greedy"] = 1e3 * (seconds - greedy[rows, spread])
        return figures

    def _sample(self, timer: Timer, logits: torch.Tensor, way: str, backend: str) -> tuple[float, torch.Tensor]:
        """Return the seconds of sampling with a backend, and the first tokens."""
        with patch.dict(os.environ, {BACKEND_VARIABLE: backend}):
            torch.manual_seed(0)
            first = sample_all(make_sampler(len(logits), logits.device, way), logits).tokens.tensor
            sampler = make_sampler(len(logits), logits.device, way)

            def run() -> None:
                sampler.table.lengths = [1] * len(logits)  # the same column of the table in every run
                sample_all(sampler, logits)

            return timer.median(run), first


def sample_all(sampler: Sampler, logits: torch.Tensor) -> Sampled:
    """Sample one token for each row of the sampler."""
    (sampled,) = SamplingBatch([SamplingTask(sampler, range(len(logits)))]).sample([Part(logits)])
    return sampled


def make_sampler(rows: int, device: torch.device, way: str) -> Sampler:
    """Return the sampler of a call that samples in one of `WAYS`."""
    config = GenerationConfig(do_sample=way != GREEDY)
    table = TokenTable(torch.zeros(rows, 1, dtype=torch.int64, device=device), 0, 8)
    seed = 0 if way.startswith("seeded") else None
    return Sampler(config, LogitsProcessorList(WAYS[way]), StoppingCriteriaList(), table, seed)
