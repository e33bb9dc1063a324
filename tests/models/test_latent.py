"""Latent attention reads the weights that the model has at the time of a call, in the dtype of the cache."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from torch import nn

import hf_parallel

IDS = tiny.make_prompts([9])[0][None]
CALL = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


class Wrapped(nn.Module):
    """A linear layer with something added, as adapters do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.in_features, self.out_features = inner, inner.in_features, inner.out_features
        self.added = nn.Parameter(torch.randn_like(inner.weight) * inner.weight.std())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + nn.functional.linear(x, self.added)


def test_a_layer_that_is_replaced_after_enable_is_used() -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("deepseek_v3")))
    before = model.generate(IDS, generation_mode="shared_prefix", **CALL)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Wrapped(layer.self_attn.kv_b_proj)
    expected = model.generate(IDS, generation_mode=None, **CALL)
    assert not torch.equal(before, expected)
    assert torch.equal(model.generate(IDS, generation_mode="shared_prefix", **CALL), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_latents_under_autocast_equal_generate(dtype: torch.dtype) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("minicpm3")))
    with torch.autocast("cpu", dtype):
        expected = model.generate(IDS, generation_mode=None, **CALL)
        assert torch.equal(model.generate(IDS, generation_mode="shared_prefix", **CALL), expected)
