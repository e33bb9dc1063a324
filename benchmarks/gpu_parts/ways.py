"""Methods of generation with a whole model, timed per step when the tokens reach the CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .. import measure
from ..measure import StepClock, tail
from .cases import OUT_OF_MEMORY, fits
from .models import PAD, attention_skipped, draw_prompt, head_dim, hogwild_settings, kv_bytes_per_token, pdos_settings
from .timing import Deadline, OutOfTimeError, PeakMemory

FIRST_STEPS = 3
"""Number of initial steps that compile, capture and warm up, and are not measured."""
FEWEST_STEPS = 4
"""Minimum number of steps for a median."""

COMPILED = {"generation_mode": "shared_prefix", "compile": True}
Way = Callable[[Any, int, int, int, Deadline], dict[str, Any]]
"""Measures (model, rows, prefix, steps, deadline)."""


def shared_prefix(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure rows over one prompt with `steps` tokens each."""
    return _timed(model, draw_prompt(model, rows, prefix), rows, steps, deadline, **COMPILED)


def uncompiled(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure `shared_prefix` without compiled decode."""
    return _timed(model, draw_prompt(model, rows, prefix), rows, steps, deadline, **COMPILED | {"compile": False})


def unshared(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure `shared_prefix` with a different prompt in each row: the same loop, with nothing to share.

    This is Hydragen's baseline (section 4.1): compiled layers and CUDA graphs, with one copy of the prompt per row.
    """
    if not fits(rows * (prefix + steps) * kv_bytes_per_token(model), model.device):
        return {"not_measured": OUT_OF_MEMORY}
    prompts = torch.cat([draw_prompt(model, 1, prefix) for _ in range(rows)])
    return _timed(model, prompts, rows, steps, deadline, **COMPILED)


def no_attention(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure `shared_prefix` without attention: an upper bound for every attention kernel."""
    with attention_skipped() as calls:
        figures = shared_prefix(model, rows, prefix, steps, deadline)
    if not calls:
        raise RuntimeError("attention was not skipped: no layer calls it by its name in models/intercept/attention.py")
    return figures


def hogwild(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure `rows` workers over one prompt."""
    prompt = draw_prompt(model, 1, prefix)
    return _timed(model, prompt, rows, steps, deadline, **hogwild_settings(model, rows), compile=True)


def pdos(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure an answer of `rows` branches with `steps` tokens each: the stage in which all branches decode.

    Its tokens are streamed when they are final, so the output's own times count, of a second call: the first one
    compiles and captures.
    """
    prompt, settings = draw_prompt(model, 1, prefix), pdos_settings(rows, steps)
    for _ in range(2):
        deadline.check()
        memory = PeakMemory(model.device)
        given = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": PAD}
        began = time.perf_counter()
        output = model.generate(prompt, **given, **settings)
        seconds = time.perf_counter() - began
    if output.fallback[0] is not None:
        raise RuntimeError(f"no block of {rows} branches: {output.fallback[0]}")
    stage = output.stages["branches"]
    figures = {"step_seconds": stage.seconds / stage.forward_passes, "steps": stage.forward_passes}
    figures |= {"tokens_per_second": stage.decoded_tokens / stage.seconds, "call_seconds": seconds}
    return figures | memory.figures() | {"stats": output.stats.to_dict()}


def generate(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure plain `generate` with a KV cache of random numbers per row instead of a prefill."""
    if not fits(rows * (prefix + steps) * kv_bytes_per_token(model), model.device):
        return {"not_measured": OUT_OF_MEMORY}
    config, cache = model.config, DynamicCache(config=model.config)
    for layer_idx in range(config.num_hidden_layers):
        shape = rows, config.num_key_value_heads, prefix - 1, head_dim(config)
        states = torch.randn(shape, dtype=model.dtype, device=model.device)
        cache.update(states, states.clone(), layer_idx)
    return _timed(model, draw_prompt(model, rows, prefix), rows, steps, deadline, past_key_values=cache)


def prefilled(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure plain `generate` with its own prefill."""
    return _timed(model, draw_prompt(model, rows, prefix), rows, steps, deadline)


def static_cache(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure `generate` with a static cache, for which transformers compiles decode steps on a GPU."""
    prompt = draw_prompt(model, rows, prefix)
    return _timed(model, prompt, rows, steps, deadline, cache_implementation="static")


def generate_batch(model: Any, rows: int, prefix: int, steps: int, deadline: Deadline) -> dict[str, Any]:
    """Measure continuous batching with `num_return_sequences`, whose rows share the pages of the prompt if possible."""
    done = measure.generate_batch(model, [draw_prompt(model, 1, prefix)[0].tolist()], steps, rows, do_sample=False)
    ticks = [max(at) for at in zip(*(result.timestamps for result in done), strict=True)]
    return _figures(rows, [after - before for before, after in itertools.pairwise(ticks)])


_OURS = (shared_prefix, uncompiled, unshared, no_attention, hogwild, pdos)
_WAYS = (*_OURS, generate, prefilled, static_cache, generate_batch)
WAYS: dict[str, Way] = {way.__name__: way for way in _WAYS}
"""Methods by name."""


def _timed(
    model: Any, prompt: torch.Tensor, rows: int, steps: int, deadline: Deadline, **settings: Any
) -> dict[str, Any]:
    """Measure one call of `generate`, cut short at the deadline if there are enough steps."""
    clock, more = StepClock(on_step=deadline.check), {}
    memory = PeakMemory(model.device)
    settings = {"generation_mode": None, "do_sample": False, "return_dict_in_generate": True, **settings}
    began = time.perf_counter()
    try:
        output = model.generate(prompt, max_new_tokens=steps, pad_token_id=PAD, streamer=clock, **settings)
        more = {"stats": output.stats.to_dict()} if getattr(output, "stats", None) else {}
    except OutOfTimeError:
        if len(clock.times) < 2 + FIRST_STEPS + FEWEST_STEPS:
            raise
    more |= {"call_seconds": time.perf_counter() - began, "first_token_seconds": clock.times[1] - began}
    return _figures(rows, clock.step_seconds) | memory.figures() | more


def _figures(rows: int, steps: Sequence[float]) -> dict[str, Any]:
    """Return the median step without the first ones, tokens per second, and the extra time of the first steps."""
    step = statistics.median(steps[FIRST_STEPS:] or steps)
    extra = sum(steps[:FIRST_STEPS]) - step * len(steps[:FIRST_STEPS])
    figures = {"step_seconds": step, "tokens_per_second": rows / step, "steps": len(steps), "warm_up_seconds": extra}
    return figures | tail(steps[FIRST_STEPS:] or steps)
