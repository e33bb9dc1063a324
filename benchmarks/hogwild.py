"""Hogwild workers over a long common prompt: a step against one of `generate`, its set-up, and more workers."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from hf_parallel import BlockCache
from hf_parallel.kernels import AttentionPlan
from hf_parallel.measure import StepClock

from .rounds import Bar, run_rounds, step_ratio


class SetUpClock(StepClock):
    """Counts apart what a forward pass spends outside its layers' arithmetic.

    That is `BlockCache.prepare`, which makes room and lays the plan out, and everything that `AttentionPlan.memo`
    makes for the layers: schedule, masks, rotary tables, indices. A layer's lookup of what is made already counts as
    the layer's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_up = 0.0
        self.set_up_at: list[float] = []
        self._inside = False

    @property
    def set_up_seconds(self) -> list[float]:
        """Set-up of each later step."""
        return [after - before for before, after in zip(self.set_up_at[1:], self.set_up_at[2:], strict=False)]

    def put(self, value: Any) -> None:
        """Note the time and the set-up so far."""
        super().put(value)
        self.set_up_at.append(self.set_up)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count inside the block."""
        prepare, memo = BlockCache.prepare, AttentionPlan.memo

        def timed_memo(plan: AttentionPlan, key: Any, make: Callable[[], Any]) -> Any:
            return memo(plan, key, lambda: self._timed(make))

        BlockCache.prepare = lambda *args: self._timed(lambda: prepare(*args))  # type: ignore[method-assign]
        AttentionPlan.memo = timed_memo  # type: ignore[method-assign]
        try:
            yield
        finally:
            BlockCache.prepare, AttentionPlan.memo = prepare, memo  # type: ignore[method-assign]

    def _timed(self, make: Callable[[], Any]) -> Any:
        if self._inside:  # one thing made inside another is counted with it
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
        Common tokens, forward passes of a call, rounds.
    workers : tuple of int
        Numbers of workers whose throughput is measured.
    layout : str
    """

    prompt: int = 2048
    passes: int = 24
    rounds: int = 5
    workers: tuple[int, ...] = (1, 2, 4, 8)
    layout: str = "combined"

    @property
    def calls(self) -> int:
        """Calls of `generate` that `run` makes, for a progress bar."""
        return 2 * (self.rounds + 1) + 2 + 2 * len(self.workers)

    def run(self, model: Any, tokenizer: Any, ids: torch.Tensor, bar: Bar) -> dict[str, Any]:
        """Measure everything over the prompt `ids`, `int64 [1, prompt]`; returns what goes into the JSON."""
        ended = model.generation_config.eos_token_id
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": self.passes}
        if ended is not None:
            settings["suppress_tokens"] = ended if isinstance(ended, list) else [ended]
        moved: list[int] = []

        def hogwild(clock: StepClock, workers: int = 2) -> Any:
            output = model.generate(
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
            moved.append(sum(step.forward_pass is not None for step in output.history[0]))
            return output

        bar.next("prefilled cache")
        row = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=row, use_cache=True, logits_to_keep=1)

        def plain(clock: StepClock) -> None:
            cache = copy.deepcopy(row)
            cache.batch_repeat_interleave(2)
            batch = ids.repeat(2, 1)
            model.generate(batch, past_key_values=cache, streamer=clock, generation_mode=None, **settings)

        times = run_rounds({"generate": plain, "hogwild": hogwild}, self.rounds, bar)
        del row
        bar.next("set-up")
        clock = SetUpClock()
        with clock.attached():
            output = hogwild(clock)
        set_up, step = statistics.median(clock.set_up_seconds), times["hogwild"].step
        scaling = {}
        for _ in range(2):  # the first time is a warm-up
            for workers in self.workers:
                bar.next(f"{workers} workers")
                clock = StepClock()
                held = hogwild(clock, workers).stats.kv_bytes
                scaling[workers] = {
                    "step_seconds": clock.median_step,
                    "tokens_per_second": workers / clock.median_step,
                    "kv_bytes": held,
                }
        return {
            "generate": {"step_seconds": times["generate"].step, "steps": times["generate"].rounded_steps},
            "hogwild": {
                "step_seconds": step,
                "steps": times["hogwild"].rounded_steps,
                "stats": output.stats.to_dict(),
            },
            "steps_moved_per_call": statistics.median(moved),
            "set_up_seconds": set_up,
            "set_up_method": " ".join((SetUpClock.__doc__ or "").split()),
            "workers": scaling,
            "ratios": {
                "step_by_generate": step_ratio(times["hogwild"], times["generate"]),
                "set_up_by_step": set_up / step,
            },
        }
