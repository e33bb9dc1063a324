"""A LogitsCache with `top_k`: exact for settings that need no other logits, an error for all others."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import PreTrainedModel

from hf_parallel import LogitsCache

KEPT, NEW = 24, 10
INPUT_IDS, ATTENTION_MASK = tiny.left_pad(tiny.make_prompts([24, 20, 11], seed=8))


def sample(model: PreTrainedModel, cache: LogitsCache | None, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "seed": 0, "pad_token_id": 0}
    given |= {"attention_mask": ATTENTION_MASK, "return_dict_in_generate": True, "logits_cache": cache}
    return model.generate(INPUT_IDS, generation_mode="shared_prefix", **(given | settings))  # type: ignore[operator]


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"top_k": 12, "temperature": 2.0},
        {"top_k": 16, "temperature": 0.7, "top_p": 0.9},
        {"top_p": 0.3},
    ],
    ids=["greedy", "top_k", "top_k and top_p", "top_p"],
)
def test_settings_that_need_only_the_kept_logits_generate_the_same_samples(
    model: PreTrainedModel, settings: dict[str, Any]
) -> None:
    cache, replayed = LogitsCache(top_k=KEPT), 0
    for seed in (0, 1, 2, 0):
        out = sample(model, cache, seed=seed, **settings)
        assert torch.equal(out.sequences, sample(model, None, seed=seed, **settings).sequences)
        replayed += out.stats.replayed_tokens
    assert replayed > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": KEPT + 1},
        {"top_p": 0.3, "temperature": 0.7},
        {"top_k": 5, "repetition_penalty": 1.3},
        {"top_k": 5, "output_logits": True},
        {"top_k": 5, "output_scores": True},
        {"do_sample": False, "output_logits": True},
    ],
    ids=str,
)
def test_settings_that_need_more_logits_raise(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"logits_cache keeps the {KEPT} highest logits"):
        sample(model, LogitsCache(top_k=KEPT), **settings)
    assert torch.equal(sample(model, None).sequences, sample(model, LogitsCache()).sequences)


def test_a_node_with_too_few_logits_is_computed_and_counted_as_a_miss(model: PreTrainedModel) -> None:
    cache = LogitsCache(top_k=KEPT)
    for top_p, replays in ((0.1, True), (0.99, False), (0.1, True)):
        expected = sample(model, None, top_p=top_p)
        first = sample(model, cache, top_p=top_p)
        hits, misses = cache.hits, cache.misses
        again = sample(model, cache, top_p=top_p)
        assert torch.equal(first.sequences, expected.sequences)
        assert torch.equal(again.sequences, expected.sequences)
        assert bool(again.stats.replayed_tokens) == replays
        assert (cache.hits - hits, cache.misses - misses) == ((3 * NEW, 0) if replays else (0, 3))
