"""Hogwild! workers over a long shared prompt: step time relative to `generate`, set-up time, scaling with workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from hf_parallel import BlockCache, HogwildOutput, Step
from hf_parallel.cli.measure import StepClock
from hf_parallel.kernels import AttentionPlan

from .rounds import Bar, PrefilledCache, run_rounds, step_ratio


class SetUpClock(StepClock):
    """Clock that also measures the set-up of a forward pass, as opposed to the arithmetic of its layers.

    The set-up is `BlockCache.prepare_run`, which reserves storage and lays out the plan, and everything that
    `AttentionPlan.cached` computes for the layers: schedule, masks, rotary tables, indices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_up = 0.0
        self.set_up_at: list[float] = []
        self._inside = False

    @property
    def set_up_seconds(self) -> list[float]:
        """Set-up of each step after the first."""
        return [after - before for before, after in zip(self.set_up_at[1:], self.set_up_at[2:], strict=False)]

    def put(self, value: Any) -> None:
        """Record the time and the accumulated set-up."""
        super().put(value)
        self.set_up_at.append(self.set_up)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Measure the set-up inside the `with` block."""
        prepare, cached = BlockCache.prepare_run, AttentionPlan.cached

        def timed_cached(plan: AttentionPlan, key: Any, make: Callable[[], Any]) -> Any:
            return cached(plan, key, lambda: self._timed(make))

        def timed_prepare(cache: BlockCache, passes: Any) -> Any:
            return self._timed(lambda: prepare(cache, passes))

        with (
            patch.object(BlockCache, "prepare_run", timed_prepare),
            patch.object(AttentionPlan, "cached", timed_cached),
        ):
            yield

    def _timed(self, make: Callable[[], Any]) -> Any:
        if self._inside:  # nested computations count once
            return make()
        self._inside, began = True, time.perf_counter()
        try:
            return make()
        finally:
            self._inside = False
            self.set_up += time.perf_counter() - began


@dataclass(frozen=True)
class HogwildBenchmark:
    """Settings and run.

    Parameters
    ----------
    prompt, passes, rounds : int
        Number of shared tokens, of forward passes per call, and of rounds.
    workers : tuple of int
        Numbers of workers to measure.
    layout : str
    """

    prompt: int = 2048
    passes: int = 24
    rounds: int = 5
    workers: tuple[int, ...] = (1, 2, 4, 8)
    layout: str = "combined"

    @property
    def calls(self) -> int:
        """Number of calls of `generate`, for a progress bar."""
        return 2 * (self.rounds + 1) + 3 + len(self.workers)

    def run(self, model: Any, tokenizer: Any, ids: torch.Tensor, bar: Bar) -> dict[str, Any]:
        """Measure with the prompt `ids`, `int64 [1, prompt]`; return an entry of the report."""
        settings = self._settings(model)

        def hogwild(clock: StepClock, workers: int = 2) -> HogwildOutput:
            return model.generate(
                ids,
                generation_mode="hogwild",
                tokenizer=tokenizer,
                num_workers=workers,
                layout=self.layout,
                answer_pattern="",
                streamer=clock,
                return_dict_in_generate=True,
                **settings,
            )

        bar.next("prefill of the cache")
        prefilled, batch = PrefilledCache(model, ids), ids.repeat(2, 1)

        def plain(clock: StepClock) -> None:
            cache = prefilled.repeated(2)
            model.generate(batch, past_key_values=cache, streamer=clock, generation_mode=None, **settings)

        times = run_rounds({"generate": plain, "hogwild": hogwild}, self.rounds, bar)
        bar.next("set-up")
        clock = SetUpClock()
        with clock.attached():
            output = hogwild(clock)
        set_up, step = statistics.median(clock.set_up_seconds), times["hogwild"].step
        history: list[Step] = output.history[0] if output.history else []
        return {
            "generate": {"step_seconds": times["generate"].step, "steps": times["generate"].rounded_steps},
            "hogwild": {
                "step_seconds": step,
                "steps": times["hogwild"].rounded_steps,
                "stats": output.stats.to_dict() if output.stats else {},
                "steps_moved": sum(step.forward_pass is not None for step in history),
            },
            "set_up_seconds": set_up,
            "set_up_method": " ".join((SetUpClock.__doc__ or "").split()),
            "workers": self._scaling(hogwild, bar),
            "ratios": {
                "step_by_generate": step_ratio(times["hogwild"], times["generate"]),
                "set_up_by_step": set_up / step,
            },
        }

    def _settings(self, model: Any) -> dict[str, Any]:
        """Return settings of greedy decoding with a fixed number of passes."""
        ends = model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends
        return {"do_sample": False, "max_new_tokens": self.passes, "suppress_tokens": ends}

    def _scaling(self, hogwild: Callable[[StepClock, int], HogwildOutput], bar: Bar) -> dict[int, dict[str, float]]:
        """Measure each number of workers in one call after a warm-up call."""
        found = {}
        for workers in (*self.workers[:1], *self.workers):
            bar.next(f"{workers} workers")
            clock = StepClock()
            stats = hogwild(clock, workers).stats
            found[workers] = {
                "step_seconds": clock.median_step,
                "tokens_per_second": workers / clock.median_step,
                "kv_bytes": stats.kv_bytes if stats else 0,
            }
        return found
