"""Fingerprints of models: weights, adapters, dropout, autocast, dtypes and memory layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import hf_parallel
from hf_parallel import LogitsCache, SharedPrefixCache
from hf_parallel.cache.fingerprint import active_dropout, fingerprint

PROMPT = tiny.make_prompts([16])[0][None]


class LowRank(nn.Module):
    """A layer with two adapters that are switched by attributes, as in PEFT, without changing a weight."""

    merged_adapters: tuple[str, ...] = ()

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.disable_adapters = base, ["one"], False
        self.scaling = {"one": 1.0, "two": 1.0}
        ranks = {name: nn.Linear(base.in_features, base.out_features, bias=False) for name in self.scaling}
        self.adapters = nn.ModuleDict(ranks)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(states)
        for name in () if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * self.adapters[name](states)
        return out


SWITCHES: dict[str, dict[str, Any]] = {
    "another": {"active_adapters": ["two"]},
    "both": {"active_adapters": ["one", "two"]},
    "none": {"disable_adapters": True},
    "stronger": {"scaling": {"one": 2.0, "two": 1.0}},
}


def adapted_model(layer: int) -> tuple[Any, LowRank]:
    """Return an enabled model and the adapters of the values of one of its layers."""
    model = copy.deepcopy(tiny.build("llama"))
    attention = model.model.layers[layer].self_attn
    attention.v_proj = adapters = LowRank(attention.v_proj)
    return hf_parallel.enable(model), adapters


@pytest.mark.parametrize("switch", SWITCHES)
def test_logits_of_another_adapter_are_not_replayed(switch: str) -> None:
    model, layer = adapted_model(1)

    def sample(**more: Any) -> Any:
        given = {"do_sample": True, "seed": 0, "max_new_tokens": 8, "return_dict_in_generate": True} | more
        return model.generate(PROMPT, generation_mode="shared_prefix", **given)

    cache = LogitsCache()
    before, weights = sample(logits_cache=cache), copy.deepcopy(model.state_dict())
    first = dict(vars(layer))
    for name, value in SWITCHES[switch].items():
        setattr(layer, name, value)
    out = sample(logits_cache=cache)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert out.stats.replayed_tokens == 0
    assert torch.equal(out.sequences, sample().sequences)
    for name in SWITCHES[switch]:
        setattr(layer, name, first[name])
    again = sample(logits_cache=cache)
    assert again.stats.forward_passes == 0
    assert torch.equal(again.sequences, before.sequences)


PARTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "element": lambda values, at: values.view(-1)[at % values.numel()],
    "row": lambda values, at: values[at % len(values)],
    "column": lambda values, at: values[..., at % values.shape[-1]],
    "head": lambda values, at: values[..., at % 4 * 16 :][..., :16],
    "rows of a head": lambda values, at: values[at % 4 * 16 :][:16],
}


def add_one(part: torch.Tensor) -> None:
    part.copy_(~part if part.dtype == torch.bool else part + 1)


def edit(model: nn.Module, place: int, part: str, at: int, way: str) -> None:
    """Change a part of one parameter or buffer."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dim()]
    tensor = tensors[place % len(tensors)]
    with torch.no_grad():
        values = {"data": tensor.data, "in place": tensor, "a copy": tensor.clone()}[way]
        selected = PARTS[part](values, at)
        add_one(selected if selected.numel() else values)
        if way == "a copy":
            tensor.copy_(values)


EDITS = {
    "place": st.integers(0, 999),
    "part": st.sampled_from(sorted(PARTS)),
    "at": st.integers(0, 9999),
    "way": st.sampled_from(["data", "in place", "a copy"]),
}


@lru_cache
def varied_model() -> Any:
    """Return a model with an adapter, two dtypes of weights, and other buffers."""
    model, _ = adapted_model(0)
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("numbers", torch.arange(5, dtype=torch.int64))
    model.model.layers[1].mlp.half()
    return model


@settings(max_examples=60)
@given(**EDITS)
def test_every_change_of_a_weight_changes_the_fingerprint(**change: Any) -> None:
    model = varied_model()
    before, values = fingerprint(model), [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().clone() for tensor in values]
    edit(model, **change)
    assert fingerprint(model) != before
    with torch.no_grad():
        for tensor, value in zip(values, kept, strict=True):
            tensor.copy_(value)
    assert fingerprint(model) == before


DYNAMIC_ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {"original_max_position_embeddings": 32, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}


def model_with_rope(kind: str, mixed: bool) -> Any:
    """Return a model whose RoPE frequencies change with the length; `mixed`: in some layers."""
    rope = {"rope_type": kind, "rope_theta": 1e4, **DYNAMIC_ROPE[kind]}
    config = copy.deepcopy(tiny.build("gemma3_text" if mixed else "llama").config)
    if mixed:
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
    config.max_position_embeddings, config.rope_parameters, config.head_dim = 32, rope, 16
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", DYNAMIC_ROPE)
def test_frequencies_that_a_long_text_sets_leave_the_fingerprint_and_others_change_it(kind: str, mixed: bool) -> None:
    model = model_with_rope(kind, mixed)
    before, (long,) = fingerprint(model), tiny.make_prompts([60])
    frequencies = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    for ids in (PROMPT, long[None], PROMPT, long[None, :40]):
        with torch.no_grad():
            model(ids)
        assert fingerprint(model) == before
    after = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert not all(map(torch.equal, frequencies, after))
    for name, buffer in model.named_buffers():
        if name.endswith("original_inv_freq"):
            buffer.mul_(1.5)
            assert fingerprint(model) != before
            buffer.div_(1.5)
    other = model_with_rope(kind, mixed)
    (other.config.rope_parameters["full_attention"] if mixed else other.config.rope_parameters)["rope_theta"] = 2e4
    assert fingerprint(other) != before
    if kind == "dynamic":  # short texts keep these frequencies
        other = model_with_rope(kind, mixed)
        next(buffer for name, buffer in other.named_buffers() if name.endswith("inv_freq")).mul_(1.5)
        assert fingerprint(other) != before


@pytest.mark.parametrize("kind", DYNAMIC_ROPE)
def test_kept_caches_and_logits_serve_a_model_after_a_long_text(kind: str) -> None:
    model, cache, logits = hf_parallel.enable(model_with_rope(kind, False)), SharedPrefixCache(), LogitsCache()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": tiny.PAD}

    def generate(**more: Any) -> Any:
        given = {"generation_mode": "shared_prefix", "return_dict_in_generate": True, **settings, **more}
        return model.generate(PROMPT, **given)

    expected = model.generate(PROMPT, **settings)
    for replayed in (0, 8):
        assert torch.equal(generate(past_key_values=cache).sequences, expected)
        out = generate(logits_cache=logits)
        assert torch.equal(out.sequences, expected)
        assert out.stats.replayed_tokens == replayed
        with torch.no_grad():
            model(tiny.make_prompts([60])[0][None])


class ConstantDropout(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(states, 0.5, self.training)


class NamedOtherwise(nn.Module):
    """Settings of a dropout layer under any name."""

    rate = 0.0

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.dropout = rate, nn.Identity()


class DropBranch(NamedOtherwise):
    pass


def with_module(module: nn.Module) -> Callable[[Any], None]:
    return lambda model: model.model.layers[1].mlp.add_module("more", module)


def with_config(model: Any) -> None:
    model.config.attention_dropout = 0.3


def with_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.attention_dropout = 0.3


@pytest.mark.parametrize(
    ("prepare", "is_active"),
    [
        (with_module(nn.Dropout(0.1)), True),
        (with_module(nn.Dropout(1.0)), True),
        (with_module(nn.Dropout(0.0)), False),
        (with_module(nn.Dropout2d(0.1)), True),
        (with_module(nn.MultiheadAttention(4, 2, dropout=0.2)), True),
        (with_module(nn.BatchNorm1d(4)), True),
        (with_module(ConstantDropout()), True),
        (with_module(DropBranch(0.2)), True),
        (with_module(DropBranch(0.0)), False),
        (with_module(NamedOtherwise(0.2)), False),
        (with_attribute, True),
        (with_config, True),
        (lambda model: None, False),
    ],
)
def test_active_dropout_is_found(prepare: Callable[[Any], None], is_active: bool) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    prepare(model)
    assert not active_dropout(model.eval())
    name = fingerprint(model)
    assert bool(active_dropout(model.train())) == is_active
    assert (fingerprint(model) != name) == is_active
