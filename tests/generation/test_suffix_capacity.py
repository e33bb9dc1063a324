"""Initial capacity of completions: short ones reserve little memory, full-length ones exactly what they use."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from transformers import PreTrainedModel
from workers import TOKENIZER

from hf_parallel.generation.decoding.prefill import BATCH_CAPACITY, MIN_CAPACITY, SUFFIX_CAPACITY, initial_capacity

PROMPT = tiny.make_prompts([20], seed=5)[0][None]


def generate(model: PreTrainedModel, rows: int, mode: str = "shared_prefix", **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "seed": 1, "eos_token_id": None, "return_dict_in_generate": True}
    if mode == "self_consistency":
        given |= {"tokenizer": TOKENIZER, "num_answers": rows}
    else:
        given["num_return_sequences"] = rows
    return model.generate(PROMPT, generation_mode=mode, **given, **settings)  # type: ignore[operator]


@pytest.mark.parametrize("rows", [1, 7, 128, 129, 512, 5000])
@pytest.mark.parametrize("longest", [0, 1, 64, 65, 299, 512, 513, 600, 2047, 10**9])
def test_doubling_the_initial_capacity_ends_at_the_longest_completion(longest: int, rows: int) -> None:
    first = capacity = initial_capacity(longest, rows)
    assert first <= min(longest, SUFFIX_CAPACITY)
    assert first <= MIN_CAPACITY or first * rows <= BATCH_CAPACITY
    while capacity < longest:
        capacity *= 2
    assert longest <= capacity < longest + max(capacity // max(first, 1), 1)


@pytest.mark.parametrize("mode", ["shared_prefix", "self_consistency"])
def test_many_completions_that_end_early_reserve_little_despite_max_new_tokens(
    model: PreTrainedModel, mode: str
) -> None:
    early = [lambda ids, _: ids.shape[1] >= PROMPT.shape[1] + 3]
    stats = generate(model, 256, mode, max_new_tokens=480, stopping_criteria=early).stats
    per_token = stats.kv_bytes / (PROMPT.shape[1] + 256 * 2)  # the last token of a row is not computed
    assert stats.reserved_bytes <= (BATCH_CAPACITY + PROMPT.shape[1]) * per_token
