"""Hogwild! workers over a long shared prompt: step time relative to `generate`, set-up time, scaling with workers."""

from __future__ import annotations

import statistics
from typing import Any

from hf_parallel.progress import progress_bar

from .measure import PrefilledCache, StepClock, long_prompt, run_rounds, step_ratio, tail

SIZES: dict[str, Any] = {"prompt": 2048, "passes": 24, "rounds": 5, "workers": (1, 2, 4, 8), "layout": "combined"}
QUICK: dict[str, Any] = {"prompt": 48, "passes": 4, "rounds": 1, "workers": (1, 3)}
TARGETS = (
    ("step_by_generate", "at most", 1.25, "step relative to generate with 2 rows"),
    ("set_up_by_step", "at most", 0.02, "set-up relative to the step"),
)


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    ids, ends = long_prompt(tokenizer, sizes.prompt).to(model.device), model.generation_config.eos_token_id
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": sizes.passes}
    settings["suppress_tokens"] = [ends] if isinstance(ends, int) else ends
    own = {"tokenizer": tokenizer, "layout": sizes.layout, "answer_pattern": "", "return_dict_in_generate": True}
    outputs: list[Any] = []

    def hogwild(clock: StepClock, workers: int = 2) -> None:
        call = {**own, **settings, "num_workers": workers, "streamer": clock}
        outputs.append(model.generate(ids, generation_mode="hogwild", **call))

    def plain(clock: StepClock) -> None:
        cache = prefilled.repeated(2)
        model.generate(ids.repeat(2, 1), past_key_values=cache, streamer=clock, generation_mode=None, **settings)

    prefilled = PrefilledCache(model, ids)
    times = run_rounds({"generate": plain, "hogwild": hogwild}, sizes.rounds)
    stats, scaling = outputs[-1].stats, {}
    numbers = (*sizes.workers[:1], *sizes.workers)  # the first call is a warm-up
    for workers in progress_bar(numbers, what="Numbers of workers", unit="calls"):
        hogwild(clock := StepClock(), workers)
        step = statistics.median(clock.step_seconds)
        figures = {"step_seconds": step, "tokens_per_second": workers / step, **tail(clock.step_seconds)}
        scaling[workers] = {**figures, "kv_bytes": outputs[-1].stats.kv_bytes}
    ratios = {
        "step_by_generate": step_ratio(times["hogwild"], times["generate"]),
        "set_up_by_step": stats.plan_seconds / stats.decode_seconds,
    }
    steps = {name: {"step_seconds": of.step, "steps": of.rounded_steps} for name, of in times.items()}
    return {**steps, "stats": stats.to_dict(), "workers": scaling, "ratios": ratios}
