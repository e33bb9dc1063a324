"""Blocks in 8 bits (`cache_dtype`): every mode has the tokens of the mode over equally rounded keys and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from hypothesis import given
from hypothesis import strategies as st
from mode_cases import BUILT_IN, small_call
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel import SharedPrefixCache
from hf_parallel.cache.arena import QuantizedArena
from hf_parallel.cache.pool import Block, Pool
from hf_parallel.kernels import LayerStorage, QuantizedStorage, quantized_dtype

IDS = tiny.make_prompts([30], seed=2)[0][None]


@pytest.fixture
def model() -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def generate(model: Any, ids: torch.Tensor = IDS, **settings: Any) -> Any:
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True} | settings
    return model.generate(ids, **{"generation_mode": "shared_prefix"} | settings)


def round_in_place(pool: Pool, block: Block) -> bool:
    """Replaces `Pool.quantize`: round the keys and values of a block, and leave them in the model's dtype."""
    assert pool.arena.quantized is not None
    for layer in pool.arena.layers.values():
        rows, quantized = layer.rows(block.tokens), pool.arena.quantized.storage_of(layer)
        quantized.resize(len(layer.keys) // layer.num_kv_heads)
        quantized.write(rows, layer.keys[rows], layer.values[rows])
        layer.keys[rows], layer.values[rows] = quantized.read(rows, layer.keys.dtype)
    return True


def assert_equals_rounding_in_place(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized_blocks: list[Block] = []
    quantize = Pool.quantize

    def count(pool: Pool, block: Block) -> bool:
        quantized_blocks.append(block)
        return quantize(pool, block)

    monkeypatch.setattr(Pool, "quantize", count)
    actual = run()
    assert all(block.extent.is_quantized or not block.length for block in quantized_blocks)
    assert quantized_blocks
    monkeypatch.setattr(Pool, "quantize", round_in_place)
    assert actual == run()


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("mode", BUILT_IN)
def test_modes_read_blocks_in_8_bits(
    mode: str, cache_dtype: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        call = {"tokenizer": AsciiTokenizer(), "cache_dtype": cache_dtype, **small_call(mode)}
        return generate(model, **call).sequences.tolist()

    assert_equals_rounding_in_place(run, monkeypatch)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "gpt_oss", "bloom"])
def test_latents_windows_sinks_and_own_attention_read_blocks_in_8_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    assert_equals_rounding_in_place(lambda: generate(other, cache_dtype="int8").sequences.tolist(), monkeypatch)


@given(st.sampled_from(["int8", "fp8"]), st.integers(0, 1000), st.sampled_from([1e-20, 1e-3, 1.0, 1e4]))
def test_rounding_is_within_half_a_step(name: str, seed: int, size: float) -> None:
    dtype = quantized_dtype(name)
    assert dtype is not None
    x = size * torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 0
    quantized = QuantizedArena(name, dtype).storage_of(LayerStorage(x.new_zeros(0, 8), x.new_zeros(0, 8), 2))
    assert isinstance(quantized, QuantizedStorage)
    quantized.resize(5)
    rows = torch.arange(10).reshape(2, 5)
    quantized.write(rows, x, -x)
    largest = x.abs().amax(-1, keepdim=True)
    step = x.abs() / 16 + largest / 448 / 512 if quantized.is_float else largest / 127 / 2
    keys, values = quantized.read(rows, torch.float32)
    assert ((keys - x).abs() <= step * 1.001).all()
    assert torch.equal(values, -keys)


def test_a_dtype_is_checked_and_is_one_for_all_calls_of_a_cache(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"cache_dtype must be one of \['int8', 'fp8'\] or None, got 'int4'"):
        generate(model, cache_dtype="int4")
    with pytest.raises(ValueError, match=r"cache_dtype must be .* got \['int8'\]"):
        SharedPrefixCache(cache_dtype=["int8"])  # type: ignore[arg-type]
    cache = SharedPrefixCache()
    generate(model, past_key_values=cache)
    with pytest.raises(ValueError, match="cache_dtype='fp8', but the cache holds blocks with cache_dtype=None"):
        generate(model, past_key_values=cache, cache_dtype="fp8")
    cache.reset()
    assert generate(model, past_key_values=cache, cache_dtype="fp8").stats.kv_bytes == cache.kv_bytes
    assert cache.pool.arena.cache_dtype == "fp8"
