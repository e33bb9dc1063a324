"""Models whose own attention runs, over dense copies of rows; `test_hybrids.py` compares them with `generate`."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from tiny_tokenizer import TOKENIZER
from transformers import DynamicCache, GenerationConfig

import hf_parallel
from hf_parallel import SharedPrefixCache, UnsupportedModelError
from hf_parallel.training import ParallelExample, teacher_forced_logits, tree_logprobs


def test_a_prompt_of_several_rows_is_stored_and_computed_once() -> None:
    model, stock = hf_parallel.enable(copy.deepcopy(tiny.build("bloom"))), DynamicCache()
    model.generation_config = GenerationConfig(pad_token_id=tiny.PAD)
    prompt, cache = tiny.make_prompts([20])[0][None], SharedPrefixCache()
    with torch.no_grad():
        model(prompt, past_key_values=stock, use_cache=True)
    token_bytes = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values)) // 20
    settings = {"past_key_values": cache, "num_return_sequences": 3, "do_sample": True, "max_new_tokens": 6}
    output = model.generate(prompt, generation_mode="shared_prefix", **settings, return_dict_in_generate=True)
    assert output.stats.prefilled_tokens == 20
    assert output.stats.kv_bytes == (20 + 3 * 5) * token_bytes


def test_modes_that_rotate_keys_and_lengths_beyond_the_positions_raise() -> None:
    model, ids = hf_parallel.enable(copy.deepcopy(tiny.build("gptj"))), torch.tensor([[5, 6, 7]])
    example = ParallelExample.from_tree([[5, 6]], [[8, 9]])
    interface = "GPTJForCausalLM does not use transformers' attention interface"
    with pytest.raises(UnsupportedModelError, match=f"hogwild rotates keys: {interface}"):
        model.generate(ids, generation_mode="hogwild", max_new_tokens=4, num_workers=2, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="positions for 512 tokens"):
        model.generate(ids, generation_mode="shared_prefix", max_new_tokens=600)
    for train in (lambda: tree_logprobs(model, [5, 6], [[8, 9]]), lambda: teacher_forced_logits(model, example)):
        with pytest.raises(UnsupportedModelError, match=f"packed rows cannot be trained over this model: {interface}"):
            train()
