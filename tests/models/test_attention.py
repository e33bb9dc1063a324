"""Probing of capabilities, unsupported models, and the state of models after `enable`, calls and errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import ARCHITECTURES
from tiny_tokenizer import TOKENIZER
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hf_parallel
from hf_parallel import UnsupportedModelError
from hf_parallel.kernels import rotate
from hf_parallel.models.intercept.attention import IMPLEMENTATION
from hf_parallel.models.latent import rotated_first
from hf_parallel.models.probing.capabilities import probe_capabilities

NO_ROTATION = {
    "llama-dynamic": "dynamic RoPE scaling, whose frequencies change with the length",
    "llama-longrope": "longrope RoPE scaling, whose frequencies change with the length",
    "gpt2": "positions that are not rotary embeddings",
    "opt": "positions that are not rotary embeddings",
    "hunyuan_v1_dense": "changes its queries after their rotary embedding",
}
ROWS = tiny.make_prompts([20, 31], seed=2)
INPUT_IDS, ATTENTION_MASK = tiny.left_pad([torch.cat((ROWS[0], tail)) for tail in tiny.make_prompts([4, 9, 9], seed=3)])


def a_copy(name: str, **settings: Any) -> PreTrainedModel:
    """A tiny model that the test may modify."""
    return copy.deepcopy(tiny.build(name, **settings))


def generate(model: PreTrainedModel, mode: str | None = None, **settings: Any) -> Any:
    given = {"generation_mode": mode} if mode else {}
    inputs = {"input_ids": INPUT_IDS, "attention_mask": ATTENTION_MASK}
    return model.generate(**given, **(inputs | {"do_sample": False, "max_new_tokens": 8} | settings))  # type: ignore[operator]


# Rotary embeddings


def queries_of(model: PreTrainedModel, positions: list[int]) -> dict[int, list[torch.Tensor]]:
    """Each layer's query `[heads, head_dim]` of one token at each of the positions."""
    seen: dict[int, list[torch.Tensor]] = {}

    def attend(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.setdefault(module.layer_idx, []).append(q[0, :, 0])  # type: ignore[arg-type]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2), None

    AttentionInterface.register("tests_queries", attend)  # type: ignore[arg-type]
    AttentionMaskInterface.register("tests_queries", lambda *_, **__: None)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("tests_queries")
        with torch.no_grad():
            for position in positions:
                model(torch.tensor([[77]]), position_ids=torch.tensor([[position]]), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return seen


@pytest.mark.parametrize("name", tiny.each(name for name in ARCHITECTURES if name not in (*NO_ROTATION, "ministral3")))
def test_rotating_by_the_probed_embedding_equals_the_model(name: str) -> None:
    """At positions other than those of the probe, in both directions."""
    model, positions = tiny.build(name), [0, 2, 3, 50, 171, 400]
    found = probe_capabilities(model)
    assert found.rotary is not None
    assert found.why_no_rotation == ""
    assert sorted(found.rotary) == list(range(model.config.num_hidden_layers))
    for layer, queries in queries_of(model, positions).items():
        spec = found.rotary[layer]
        if found.has_latents:  # the rotated dimensions come last
            assert spec is not None
            assert spec.of_values
            queries = [rotated_first(query, spec.rotary_dim) for query in queries]  # noqa: PLW2901
        for start, query in zip(positions, queries, strict=True):
            for end, expected in zip(positions, queries, strict=True):
                rotated = query.double()
                if spec is not None:
                    delta = torch.tensor([end - start]).numpy()
                    rotated = rotate(rotated, *spec.tables(delta, torch.float64, torch.device("cpu")), spec)
                torch.testing.assert_close(rotated, expected.double(), rtol=0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", NO_ROTATION)
def test_models_without_rotation_have_a_reason(name: str) -> None:
    model = a_copy(name)
    before = snapshot(model)
    found = probe_capabilities(model)
    assert snapshot(model) == before  # including frequencies that follow the length
    assert found.rotary is None
    assert NO_ROTATION[name] in found.why_no_rotation
    hf_parallel.enable(model)
    with pytest.raises(UnsupportedModelError, match=NO_ROTATION[name]):
        generate(model, "hogwild", tokenizer=TOKENIZER)


@pytest.mark.parametrize(("name", "length"), [("llama-dynamic", tiny.MAX_POSITIONS), ("llama-longrope", 256)])
def test_lengths_at_which_frequencies_change_raise(name: str, length: int) -> None:
    model = hf_parallel.enable(a_copy(name))
    prompt = tiny.make_prompts([length - 8])[0][None]
    settings = {"generation_mode": "shared_prefix", "do_sample": False}
    plain = model.generate(prompt, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    assert torch.equal(model.generate(prompt, max_new_tokens=8, **settings), plain)  # type: ignore[operator]
    with pytest.raises(UnsupportedModelError, match=f"frequencies after {length} tokens.* got {length + 1}"):
        model.generate(prompt, max_new_tokens=9, **settings)  # type: ignore[operator]


# Unsupported models


@pytest.mark.parametrize("where", ["lm_head.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_logits_that_are_not_finite_raise(where: str) -> None:
    model = a_copy("llama")
    model.get_parameter(where).data.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM returns logits that are not finite"):
        hf_parallel.enable(model)


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """State that `enable`, a call and `disable` must not change."""
    names = ("gradient_checkpointing", "training", "layer_idx")
    return {
        "class": type(model),
        "attributes": sorted(vars(model)),
        "implementation": model.config._attn_implementation,
        "modules": [tuple(getattr(m, n, None) for n in names) for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "buffers": [(n, buffer.sum().item()) for n, buffer in model.named_buffers() if "original" not in n],
        "generation_config": model.generation_config.to_dict(),  # type: ignore[union-attr]
    }


# Enable and disable


def test_enable_and_disable_are_idempotent_and_restore_the_model() -> None:
    model, plain = a_copy("llama"), LlamaForCausalLM
    before, expected = snapshot(model), generate(model)
    for _ in range(2):
        assert hf_parallel.enable(model) is model
    assert isinstance(model, plain)
    assert torch.equal(generate(model, "shared_prefix"), expected)
    for _ in range(2):
        assert hf_parallel.disable(model) is model
    assert snapshot(model) == before
    assert torch.equal(generate(model), expected)
    with pytest.raises((ValueError, TypeError)):  # unknown argument
        generate(model, "shared_prefix")


def test_enabled_model_is_saved_with_its_own_class(tmp_path: Path) -> None:
    model = hf_parallel.enable(a_copy("qwen3"))
    expected = generate(model, "shared_prefix")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"]
    assert IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(tiny.build("qwen3"))
    assert torch.equal(generate(loaded), expected)


# Precision and training


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "gemma2", "mixtral"])
def test_bfloat16_is_as_close_to_float32_as_generate(name: str) -> None:
    model = hf_parallel.enable(a_copy(name, dtype=torch.bfloat16))
    prompts = torch.stack([tiny.make_prompts([40], seed=seed)[0] for seed in range(40)])

    def logits(model: PreTrainedModel, mode: str | None = None) -> torch.Tensor:
        settings = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        output = model.generate(prompts, generation_mode=mode, **settings)  # type: ignore[operator]
        if mode:
            assert output.past_key_values.pool.arena.layers[0].keys.dtype == torch.bfloat16
        return output.logits[0]

    exact = logits(hf_parallel.enable(a_copy(name)))
    plain, ours = ((x - exact).norm(dim=-1).median() for x in (logits(model), logits(model, "shared_prefix")))
    assert ours < 1.2 * plain
