"""Models whose own attention runs, over dense copies of rows; `test_hybrids.py` compares them with `generate`."""

from __future__ import annotations

import copy
from typing import Any

import mapping
import pytest
import tiny
import torch
from tiny_tokenizer import TOKENIZER
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LlamaForCausalLM

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
    model, ids = hf_parallel.enable(copy.deepcopy(tiny.build("xglm"))), torch.tensor([[5, 6, 7]])
    example = ParallelExample.from_tree([[5, 6]], [[8, 9]])
    interface = "XGLMForCausalLM does not use transformers' attention interface"
    with pytest.raises(UnsupportedModelError, match=f"hogwild rotates keys: {interface}"):
        model.generate(ids, generation_mode="hogwild", max_new_tokens=4, num_workers=2, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="positions for 512 tokens"):
        model.generate(ids, generation_mode="shared_prefix", max_new_tokens=600)
    for train in (lambda: tree_logprobs(model, [5, 6], [[8, 9]]), lambda: teacher_forced_logits(model, example)):
        with pytest.raises(UnsupportedModelError, match=f"packed rows cannot be trained over this model: {interface}"):
            train()


@pytest.mark.parametrize(
    ("spread", "dtype"), [(0.002, torch.float32), (0.02, torch.bfloat16), (0.02, torch.float32), (0.4, torch.float32)]
)
def test_a_bidirectional_model_is_refused_whatever_the_size_of_its_weights(spread: float, dtype: torch.dtype) -> None:
    config = copy.deepcopy(tiny.build("bert-encoder").config)
    config.initializer_range = spread
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with pytest.raises(UnsupportedModelError, match="is bidirectional: its tokens attend to later ones"):
        hf_parallel.enable(model)


@pytest.mark.parametrize("name", ["mamba", "roformer"])
def test_probes_see_through_the_small_weights_of_a_new_model(name: str) -> None:
    """A Mamba that continues by several tokens at a time, and a RoFormer with padding, are off by 6e-3 and 6e-5."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(mapping.small_config(name)).eval()
    capabilities = hf_parallel.enable(model)._parallel.capabilities
    assert all(mixer.stepwise for mixer in capabilities.mixers)
    assert capabilities.dense == (name == "roformer")
    assert not (capabilities.dense and capabilities.pads)


class NeedsImages(LlamaForCausalLM):
    def forward(self, *args: Any, pixel_values: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if pixel_values is None:
            raise self.error
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, AttributeError, AssertionError, KeyError, TypeError])
def test_a_model_that_fails_over_text_is_unsupported_and_says_why(error: type[Exception]) -> None:
    model: Any = NeedsImages(tiny.build("llama").config).eval()
    model.error = error("pixel_values are missing")
    with pytest.raises(UnsupportedModelError, match=f"NeedsImages fails .*{error.__name__}: .*pixel_values"):
        hf_parallel.enable(model)
    model.error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        hf_parallel.enable(model)
