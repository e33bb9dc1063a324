"""Prefill after a replay: if only the last token of each row is uncached, the first decode step computes it."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from stateful import EndRow
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_parallel import LogitsCache, SharedPrefixCache

PROMPT = tiny.make_prompts([24], seed=8)[0][None]
NEW = 24


def sample(model: PreTrainedModel, mode: str = "resample", ids: torch.Tensor = PROMPT, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "temperature": 0.4, "max_new_tokens": NEW, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "generation_mode": mode, "eos_token_id": None}
    return model.generate(ids, **(given | settings))  # type: ignore[operator]


def assert_no_uncached_tokens(kv_cache: SharedPrefixCache) -> None:
    assert not any(len(node.uncached) for node in kv_cache.tree.nodes())
    assert {node.block for node in kv_cache.tree.nodes()} == kv_cache.pool.blocks
    assert all(node.block is not None and node.block.base == node.start for node in kv_cache.tree.nodes())


@pytest.mark.parametrize("rows", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_that_continue_after_a_replay_equal_those_without_a_cache(model: PreTrainedModel, rows: int) -> None:
    caches = {keep: (LogitsCache(), SharedPrefixCache()) for keep in (True, False)}
    continued = dict.fromkeys(caches, 0)
    for seed in range(3):
        settings = {"seed": seed, "num_return_sequences": rows}
        expected = sample(model, "shared_prefix", **settings).sequences
        for keep, (cache, kv_cache) in caches.items():
            out = sample(model, logits_cache=cache, past_key_values=kv_cache, keep_completions=keep, **settings)
            assert torch.equal(out.sequences, expected)
            continued[keep] += 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
            assert_no_uncached_tokens(kv_cache)
    assert all(continued.values())


def test_a_row_whose_prompt_includes_the_replayed_token_of_another_row_attends_to_it(model: PreTrainedModel) -> None:
    """Row 1's prompt is row 0's prompt plus the token that row 0 replays; the KV cache has neither last token."""
    cache, kv_cache = LogitsCache(), SharedPrefixCache()
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None}
    ended = StoppingCriteriaList([EndRow()])  # stateful, so that all rows replay or none
    first = sample(model, logits_cache=cache, max_new_tokens=2, **greedy).sequences
    ids, mask = tiny.left_pad([first[0, :-2], first[0, :-1]])
    sample(model, "shared_prefix", past_key_values=kv_cache, max_new_tokens=1, keep_completions=False, **greedy)
    settings = {"attention_mask": mask, "stopping_criteria": ended, **greedy}
    out = sample(model, ids=ids, logits_cache=cache, past_key_values=kv_cache, **settings)
    settings["stopping_criteria"] = StoppingCriteriaList([EndRow()])
    assert torch.equal(out.sequences, sample(model, "shared_prefix", ids=ids, **settings).sequences)
    assert out.stats.replayed_tokens > 0
    assert_no_uncached_tokens(kv_cache)
