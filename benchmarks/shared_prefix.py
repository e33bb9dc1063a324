"""Completions of one long prompt: `shared_prefix`, three methods of transformers, and a lower bound.

The bound is the same batch over a prompt of 4 tokens, whose attention costs next to nothing.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch

from .measure import (
    PrefilledCache,
    StepClock,
    Times,
    dense_bytes,
    generate_batch,
    long_prompt,
    prefill_ratio,
    run_rounds,
    step_ratio,
)

SIZES: dict[str, Any] = {"prompt": 2048, "rows": 16, "new_tokens": 16, "rounds": 5}
SIZES |= {"generate": 1, "generate_batch": 1, "prefilled_cache": 1}
"""The last three: whether to measure plain `generate`, continuous batching, and copies of a cache."""
QUICK: dict[str, Any] = {"prompt": 48, "rows": 3, "new_tokens": 4, "rounds": 1}
BOUND_PROMPT = 4
KEPT_STATES = 2
"""States of the prompt, if layers keep states: at its end and before its last token."""
TARGETS = (
    ("prefill_by_one_row", "at most", 1.1, "prefill relative to one row"),
    ("step_by_bound", "at most", 1.25, "decode step relative to the bound"),
    ("kv_bytes_by_unique_tokens", "at most", 1.0, "KV bytes relative to the unique tokens'"),
    ("states_by_rows_and_prompt", "at most", 1.0, "states relative to one per row and two of the prompt"),
)


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report; without a tokenizer, of a random prompt."""
    drawn = torch.randint(1, model.config.vocab_size, (1, sizes.prompt))
    ids = (long_prompt(tokenizer, sizes.prompt) if tokenizer else drawn).to(model.device)
    batch = ids.repeat(sizes.rows, 1)

    def call(given: torch.Tensor, tokens: int = sizes.new_tokens, **settings: Any) -> Any:
        settings = {"generation_mode": None, "max_new_tokens": tokens, "min_new_tokens": tokens} | settings
        return model.generate(given, do_sample=False, return_dict_in_generate=True, **settings)

    def over_copies(clock: StepClock) -> None:
        output = call(batch, streamer=clock, past_key_values=prefilled.repeated(sizes.rows))
        prefilled.sequences, prefilled.kv_bytes = output.sequences, dense_bytes(output.past_key_values)

    prefills = {
        "one_row": lambda clock: call(ids, 1, streamer=clock),
        "shared_prefix": lambda clock: call(batch, 1, streamer=clock, generation_mode="shared_prefix"),
    }
    prefill = run_rounds(prefills, sizes.rounds)
    kept = call(batch, 1, generation_mode="shared_prefix").past_key_values
    ways: dict[str, Any] = {
        "bound": lambda clock: call(batch[:, -BOUND_PROMPT:], streamer=clock),
        "shared_prefix": lambda clock: call(
            batch, streamer=clock, generation_mode="shared_prefix", past_key_values=kept, keep_completions=False
        ),
    }
    if sizes.prefilled_cache:
        prefilled = PrefilledCache(model, ids)
        ways["prefilled_cache"] = over_copies
    decode = run_rounds(ways, sizes.rounds)
    ours = call(batch, generation_mode="shared_prefix")
    one_row = statistics.median(prefill["one_row"].prefill)
    found: dict[str, Any] = {"one_row": {"prefill_seconds": one_row}}
    found |= {name: figures(sizes.rows, times) for name, times in decode.items()}
    token_bytes = ours.past_key_values.pool.arena.bytes_per_token
    found["ratios"] = {
        "prefill_by_one_row": prefill_ratio(prefill["shared_prefix"], prefill["one_row"]),
        "step_by_bound": step_ratio(decode["shared_prefix"], decode["bound"]),
        "kv_bytes_by_unique_tokens": ours.stats.kv_bytes
        / (token_bytes * (sizes.prompt + sizes.rows * (sizes.new_tokens - 1))),
    }
    states = ours.past_key_values.pool.states
    if states.in_use:
        held = ours.stats.state_bytes / states.bytes_per_slot
        found["ratios"]["states_by_rows_and_prompt"] = held / (sizes.rows + KEPT_STATES)
    found["shared_prefix"] |= {
        "prefill_seconds": statistics.median(prefill["shared_prefix"].prefill),
        "kv_bytes": ours.stats.kv_bytes,
        "stats": ours.stats.to_dict(),
    }
    sequences = {"shared_prefix": ours.sequences}
    if sizes.prefilled_cache:
        found["ratios"]["step_of_prefilled_cache_by_ours"] = step_ratio(
            decode["prefilled_cache"], decode["shared_prefix"]
        )
        seconds = one_row + statistics.median(prefilled.copying)
        found["prefilled_cache"] |= {"prefill_seconds": seconds, "kv_bytes": prefilled.kv_bytes}
        sequences["prefilled_cache"] = prefilled.sequences
    if sizes.generate:  # once, mainly for its prefill
        print(f"generate, prefill of {sizes.rows} x {sizes.prompt} tokens")
        output = call(batch, streamer=(clock := StepClock()))
        found["generate"] = figures(sizes.rows, Times([clock.prefill_seconds], [clock.step_seconds]))
        found["generate"] |= {"prefill_seconds": clock.prefill_seconds, "kv_bytes": dense_bytes(output.past_key_values)}
        sequences["generate"] = output.sequences
    found["same_tokens"] = all(torch.equal(one, ours.sequences) for one in sequences.values())
    if sizes.generate_batch:
        found["generate_batch"] = continuous_batching(model, ids, ours.sequences, sizes)
    return found


def figures(rows: int, times: Times) -> dict[str, Any]:
    """Return the figures of the steps of a method."""
    return {"step_seconds": times.step, "tokens_per_second": rows / times.step, "steps": times.rounded_steps}


def continuous_batching(model: Any, ids: torch.Tensor, expected: torch.Tensor, sizes: Any) -> dict[str, Any]:
    """Measure continuous batching with `num_return_sequences`, whose rows share the pages of the prompt."""
    print("generate_batch (continuous batching)")
    try:
        requests = generate_batch(model, [ids[0].tolist()], sizes.new_tokens, sizes.rows, do_sample=False)
    except Exception as error:  # an error is reported as a result
        return {"error": f"{type(error).__name__}: {error}"}
    began = min(request.lifespan[0] for request in requests)
    ticks = [max(at) for at in zip(*(request.timestamps for request in requests), strict=True)]
    times = Times([ticks[0] - began], [[after - before for before, after in itertools.pairwise(ticks)]])
    same = all(request.generated_tokens == expected[0, sizes.prompt :].tolist() for request in requests)
    return figures(sizes.rows, times) | {"prefill_seconds": times.prefill[0], "same_tokens": same}
