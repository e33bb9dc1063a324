"""Hogwild! workers over a long shared prompt: step time relative to `generate`, set-up time, scaling with workers."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_parallel import HogwildOutput

from .measure import StepClock, long_prompt
from .report import run_benchmark
from .rounds import PrefilledCache, run_rounds, step_ratio

TARGETS = (
    ("step_by_generate", "at most", 1.25, "step relative to generate with 2 rows"),
    ("set_up_by_step", "at most", 0.02, "set-up relative to the step"),
)


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

    def run(self, model: Any, tokenizer: Any, ids: torch.Tensor) -> dict[str, Any]:
        """Measure with the prompt `ids`, `int64 [1, prompt]`; return the entries of the report."""
        ends = model.generation_config.eos_token_id
        settings = {
            "do_sample": False,
            "max_new_tokens": self.passes,
            "suppress_tokens": [ends] if isinstance(ends, int) else ends,
        }
        own = {"tokenizer": tokenizer, "layout": self.layout, "answer_pattern": "", "return_dict_in_generate": True}
        outputs: list[HogwildOutput] = []

        def hogwild(clock: StepClock, workers: int = 2) -> None:
            call = {**own, **settings, "num_workers": workers, "streamer": clock}
            outputs.append(model.generate(ids, generation_mode="hogwild", **call))

        print("prefill of the cache")
        prefilled, batch = PrefilledCache(model, ids), ids.repeat(2, 1)

        def plain(clock: StepClock) -> None:
            cache = prefilled.repeated(2)
            model.generate(batch, past_key_values=cache, streamer=clock, generation_mode=None, **settings)

        times = run_rounds({"generate": plain, "hogwild": hogwild}, self.rounds)
        stats = outputs[-1].stats
        scaling = {}
        for workers in (*self.workers[:1], *self.workers):  # the first call is a warm-up
            print(f"{workers} workers")
            clock = StepClock()
            hogwild(clock, workers)
            step = clock.median_step
            figures = {"step_seconds": step, "tokens_per_second": workers / step}
            scaling[workers] = {**figures, "kv_bytes": outputs[-1].stats.kv_bytes}
        return {
            "settings": asdict(self),
            **{name: {"step_seconds": of.step, "steps": of.rounded_steps} for name, of in times.items()},
            "stats": stats.to_dict(),
            "workers": scaling,
            "ratios": {
                "step_by_generate": step_ratio(times["hogwild"], times["generate"]),
                "set_up_by_step": stats.plan_seconds / stats.decode_seconds,
            },
        }


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        benchmark = HogwildBenchmark(options.prompt, rounds=options.rounds)
        if options.quick:
            benchmark = HogwildBenchmark(prompt=48, passes=4, rounds=1, workers=(1, 3))
        return benchmark.run(model, tokenizer, long_prompt(tokenizer, benchmark.prompt).to(model.device))

    return run_benchmark("hogwild", __doc__, measure, TARGETS, prompt=2048, rounds=5)


if __name__ == "__main__":
    sys.exit(main())
