"""`resample`: replayed samples equal those of the model; only tokens that are not cached need forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import test_shared_prefix
import tiny
import torch
from stateful import Alternate, EndRow, FollowOthers
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_parallel import LogitsCache, SharedPrefixCache

EVERY_SETTING, SMALL_CALL = test_shared_prefix.EVERY_SETTING, test_shared_prefix.SMALL_CALL
"""The settings are those of shared_prefix."""


NEW = 12
SHARED, *TAILS = tiny.make_prompts([20, 4, 4, 9], seed=8)
INPUT_IDS, ATTENTION_MASK = tiny.left_pad([torch.cat((SHARED, tail)) for tail in TAILS])


def sample(model: PreTrainedModel, mode: str = "resample", **settings: Any) -> Any:
    defaults: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": NEW, "seed": 0}
    defaults |= {"attention_mask": ATTENTION_MASK, "return_dict_in_generate": True, "pad_token_id": 0}
    defaults |= {"input_ids": INPUT_IDS}
    return model.generate(generation_mode=mode, **(defaults | settings))  # type: ignore[operator]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"num_return_sequences": 4}])
def test_the_same_seed_needs_no_forward_pass(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    cache = LogitsCache()
    first = sample(model, logits_cache=cache, **settings)
    again = sample(model, logits_cache=cache, **settings)
    assert torch.equal(first.sequences, again.sequences)
    assert again.stats.forward_passes == 0
    assert again.stats.replayed_tokens == again.stats.decoded_tokens == first.stats.decoded_tokens


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"num_return_sequences": 3}])
def test_other_seeds_give_the_samples_without_a_cache(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    caches = [{"logits_cache": LogitsCache(), "past_key_values": kept} for kept in (None, SharedPrefixCache())]
    replayed = [0, 0]
    for seed in range(3):
        settings = {**settings, "seed": seed, "eos_token_id": [3, 5, 9, 11]}
        expected = sample(model, "shared_prefix", **settings).sequences
        for i, cache in enumerate(caches):
            out = sample(model, **cache, **settings)
            assert torch.equal(out.sequences, expected)
            replayed[i] += out.stats.replayed_tokens
    assert all(replayed)


HELPERS: dict[str, Any] = {
    "stateful processor": lambda: {"logits_processor": LogitsProcessorList([Alternate()])},
    "processor that reads other rows": lambda: {"logits_processor": LogitsProcessorList([FollowOthers()])},
    "stateful criterion": lambda: {"stopping_criteria": StoppingCriteriaList([EndRow()])},
}


@pytest.mark.parametrize("prompts", [1, len(TAILS)])
@pytest.mark.parametrize("kind", HELPERS)
def test_stateful_processors_and_criteria_act_as_without_a_cache(
    model: PreTrainedModel, kind: str, prompts: int
) -> None:
    cache, replayed = LogitsCache(), 0
    of = {"input_ids": INPUT_IDS[:prompts], "attention_mask": ATTENTION_MASK[:prompts], "temperature": 0.2}
    for seed in (0, 1, 2, 0):
        out = sample(model, logits_cache=cache, seed=seed, **HELPERS[kind](), **of)
        plain = sample(model, "shared_prefix", seed=seed, **HELPERS[kind](), **of)
        assert torch.equal(out.sequences, plain.sequences)
        replayed += out.stats.replayed_tokens
    assert replayed > out.stats.replayed_tokens == out.stats.decoded_tokens
