"""A `BlockCache` under stock attention computes the logits of `DynamicCache`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_parallel.cache import BlockCache, Segment, View


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def stock(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = copy.deepcopy(tiny.build("llama"))
    model.set_attn_implementation(request.param)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **inputs: Any) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs).logits


def test_rows_over_a_shared_prompt_have_the_logits_of_dynamic_cache(stock: PreTrainedModel) -> None:
    prompt, *suffixes = tiny.make_prompts([11, 6, 6, 6])
    cache, dynamic = BlockCache(), DynamicCache()
    shared = cache.pool.new_block()
    cache.rows = [[shared]]
    logits(stock, prompt[None], cache)
    logits(stock, prompt.repeat(3, 1), dynamic)
    cache.rows = [[shared, own] for own in cache.pool.new_blocks(3, base=11)]
    rows = torch.stack(suffixes)
    for part in rows.split([1, 3, 1, 1], dim=1):
        expected = logits(stock, part, dynamic)
        torch.testing.assert_close(logits(stock, part, cache), expected, rtol=0, atol=2e-5)
    assert cache.kv_bytes == (11 + 3 * 6) * cache.pool.arena.bytes_per_token
    assert cache.get_seq_length() == 17


def test_rows_of_unequal_length_have_the_logits_of_separate_rows(stock: PreTrainedModel) -> None:
    prompts = tiny.make_prompts([3, 14, 8])
    cache, alone = BlockCache(), [DynamicCache() for _ in prompts]
    rows: list[View] = [[block] for block in cache.pool.new_blocks(3)]
    for row, prompt, dynamic in zip(rows, prompts, alone, strict=True):
        cache.rows = [row]
        expected = logits(stock, prompt[None], dynamic)
        torch.testing.assert_close(logits(stock, prompt[None], cache), expected, rtol=0, atol=2e-5)
    for new in (1, 4, 1):
        tokens = torch.stack(tiny.make_prompts([new] * 3, seed=new))
        segments = [Segment(row, new) for row in rows]
        forward = cache.prepare(segments)
        found = logits(
            stock,
            tokens,
            cache,
            position_ids=forward.position_ids.reshape(3, new),
            attention_mask=cache.attention_mask(),
        )
        cache.commit()
        expected = torch.cat([logits(stock, t[None], d) for t, d in zip(tokens, alone, strict=True)])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("lengths", [[12], [12, 5, 9]], ids=["one row", "left-padded batch"])
def test_plain_generate_works_over_a_block_cache(stock: PreTrainedModel, lengths: list[int]) -> None:
    ids, mask = tiny.left_pad(tiny.make_prompts(lengths))
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = stock.generate(ids, **settings)
    cache = BlockCache()
    assert torch.equal(stock.generate(ids, past_key_values=cache, **settings), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_beam_search_over_a_block_cache_raises(stock: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="beam search"):
        stock.generate(tiny.make_prompts([9])[0][None], past_key_values=BlockCache(), max_new_tokens=3, num_beams=2)
