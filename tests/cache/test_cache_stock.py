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


@pytest.mark.parametrize(
    "search", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_beam_search_and_prompt_lookup_generate_the_same_tokens(stock: PreTrainedModel, search: dict[str, int]) -> None:
    ids = tiny.make_prompts([9], seed=2)[0].repeat(2)[None]  # repeated, so that prompt lookup finds matches
    settings = {"max_new_tokens": 12, "do_sample": False, **search}
    cache = BlockCache()
    assert torch.equal(stock.generate(ids, past_key_values=cache, **settings), stock.generate(ids, **settings))
    assert len(cache.pool.blocks) == search.get("num_beams", 1)


def test_rows_are_selected_repeated_and_cropped_as_in_dynamic_cache(stock: PreTrainedModel) -> None:
    """Over a shared prompt, part of which the last crop removes."""
    prompt, *suffixes = tiny.make_prompts([11, 4, 4, 4])
    cache, dynamic = BlockCache(), DynamicCache()
    assert cache.batch_size == -1
    shared = cache.pool.new_block()
    cache.rows = [[shared]]
    logits(stock, prompt[None], cache)
    logits(stock, prompt.repeat(3, 1), dynamic)
    cache.rows = [[shared, own] for own in cache.pool.new_blocks(3, base=11)]
    rows = torch.stack(suffixes)
    for change in (
        lambda cache: None,
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.crop(torch.tensor(-2)),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.crop(0),
        lambda cache: cache.batch_select_indices(torch.tensor([5, 0, 1])),
        lambda cache: cache.crop(-27),
    ):
        change(cache)
        change(dynamic)
        part = rows[torch.arange(cache.batch_size) % 3]
        torch.testing.assert_close(logits(stock, part, cache), logits(stock, part, dynamic), rtol=0, atol=2e-5)
        assert cache.get_seq_length() == dynamic.get_seq_length()
    assert cache.pool.blocks == {shared, *(view[-1] for view in cache.rows)}
