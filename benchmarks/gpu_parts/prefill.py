"""Prefill of a prompt, compared with one forward pass of the plain model over the same tokens."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from .cases import Bench, Case, Target, figure
from .models import PAD, draw_prompt
from .timing import PeakMemory


@dataclass(frozen=True)
class PrefillStage:
    """Settings and cases.

    Parameters
    ----------
    models : tuple of str
        Keys of `CONFIGS`.
    lengths : tuple of int
        Lengths of the prompt.
    repeats : int
        Number of measurements per median.
    """

    share: ClassVar[float] = 0.06

    models: tuple[str, ...] = ("Qwen3-8B",)
    lengths: tuple[int, ...] = (32768, 4096, 16384, 1024)
    repeats: int = 3

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations."""
        for name, length in itertools.product(self.models, self.lengths):
            yield Case({"model": name, "length": length}, partial(self._measure, bench, name, length))

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        return [Target("prefill: time relative to one forward pass", figure("by_plain"), 1.02)]

    def _measure(self, bench: Bench, name: str, length: int) -> dict[str, Any]:
        """Measure `generate` with one new token and a forward pass, in turn, after one call of each."""
        model = bench.models.get(name)
        prompt = draw_prompt(model, 1, length)
        ways: dict[str, Callable[[], object]] = {
            "": partial(
                model.generate,
                prompt,
                generation_mode="shared_prefix",
                do_sample=False,
                max_new_tokens=1,
                pad_token_id=PAD,
            ),
            "plain_": partial(_forward, model, prompt),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        figures: dict[str, Any] = {}
        for _ in range(1 + self.repeats):
            for way, run in ways.items():
                bench.deadline.check()
                memory = PeakMemory(model.device)
                times[way].append(_seconds(run, model.device))
                figures |= {f"{way}{key}": size for key, size in memory.figures().items()}
        seconds, plain = (statistics.median(times[way][1:]) for way in ("", "plain_"))
        figures |= {"seconds": seconds, "plain_seconds": plain, "by_plain": seconds / plain}
        return figures


def _forward(model: Any, prompt: torch.Tensor) -> None:
    """Compute keys, values and the last logits of a prompt, as the prefill of `generate` does."""
    with torch.no_grad():
        model(prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
