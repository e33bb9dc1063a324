"""Packed weights: results of the float32 model with the same weights, in a fraction of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import hf_parallel
from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.cli.main import main
from hf_parallel.engine import Engine
from hf_parallel.kernels import native
from hf_parallel.models.cpu.linear import PACKINGS, linear_layers
from hf_parallel.models.cpu.packed import PackedLinear, pack_half
from hf_parallel.models.loading import load_model

pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason="packed weights need a C compiler")
QUESTIONS = ["Why is the sky blue?", "Name three rivers.", "What is 17 times 3?", "Write a haiku about rain."]


def packed_weights(packing: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights packed, and what they stand for by the definition of GGUF or the dtype, in float32."""
    weights = torch.randn(rows, columns)
    if dtype := {name: dtype for dtype, name in PACKINGS.items()}.get(packing):
        return weights.to(dtype), weights.to(dtype).float()
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[packing]
    if packing.endswith("_K"):  # gguf only reads these: random bytes, with small scales
        size, count = native.PACKINGS[packing]
        blocks = torch.randint(256, (rows, columns // count, size), dtype=torch.uint8).numpy()
        halves = torch.rand(rows, columns // count, 2).sub(0.5).div(1 << 10).half().numpy().view("uint8")
        scales = slice(208, 210) if packing == "Q6_K" else slice(4)
        blocks[..., scales] = halves[..., : 2 if packing == "Q6_K" else 4]
        blocks = blocks.reshape(rows, -1)
    else:
        blocks = gguf.quantize(weights.numpy(), kind)
    return torch.from_numpy(blocks), torch.from_numpy(gguf.dequantize(blocks, kind))


@pytest.mark.parametrize("packing", native.PACKINGS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernel_equals_that_of_the_unpacked_weights_to_the_last_bit(packing: str, threads: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        large = native.PACKINGS[packing][1] == 256
        for rows, columns in ((1, 256), (31, 768)) if large else ((1, 32), (31, 96), (200, 416)):
            packed, weights = packed_weights(packing, rows, columns)
            assert torch.equal(native.unpack(packed, packing), weights)
            for tokens in (1, 2, 8, 9, 31, 64):
                x, bias = torch.randn(tokens, columns), torch.randn(rows)
                out = native.linear(x, packed, bias, packing)
                assert torch.equal(out, native.linear(x, weights, bias))
                torch.testing.assert_close(out, x @ weights.T + bias, rtol=0, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_a_layer_of_no_tokens_unpacks_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PackedLinear("BF16", packed_weights("BF16", 200, 480)[0].view(torch.uint8))
    monkeypatch.setattr(native, "unpack", None)
    with torch.no_grad():  # as chunks of a prompt before the last, which need no logits
        assert layer(torch.randn(1, 0, 480)).shape == (1, 0, 200)


@pytest.mark.parametrize("packing", native.INTEGERS)
def test_products_in_integers_are_exact_for_rounded_activations_and_do_not_depend_on_other_rows(packing: str) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        large = native.PACKINGS[packing][1] == 256
        for rows, columns in ((1, 256), (37, 768)) if large else ((1, 32), (37, 96), (200, 416)):
            packed, weights = packed_weights(packing, rows, columns)
            x, bias = torch.randn(300, columns) * torch.randn(300, 1).exp(), torch.randn(rows)
            x[2], x[3, :32] = 0, 1e-40
            blocks = x.view(300, -1, 32)
            largest = blocks.abs().amax(-1, keepdim=True)
            scales = torch.where(largest > 1e-30, torch.full_like(largest, 127) / largest, 0)
            rounded = ((blocks * scales).round().double() * (largest / 127).double()).view_as(x)
            out = native.linear(x, packed, bias, packing, int8=True)
            expected = rounded @ weights.double().T + bias
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for tokens in (1, 2, 5, 6, 7, 13, 64, 257):
                    some = native.linear(x[-tokens:], packed, bias, packing, int8=True)
                    assert torch.equal(some, out[-tokens:])
            x[1, -1], x[4, 0] = torch.nan, torch.inf
            out = native.linear(x[:5], packed, None, packing, int8=True)
            assert out.isfinite().all(dim=1).tolist() == [True, False, True, True, False]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_layers_of_many_and_few_tokens_and_with_gradients_compute_the_same(tokens: int) -> None:
    packed, weights = packed_weights("BF16", 10_000, 480)  # unpacked in two parts
    bias = nn.Parameter(torch.randn(10_000))
    layer = PackedLinear("BF16", packed.view(torch.uint8), bias)
    x = torch.randn(2, tokens // 2 + 1, 480, requires_grad=True)
    recorded = layer(x)
    torch.testing.assert_close(recorded, nn.functional.linear(x, weights, bias), rtol=0, atol=1e-4)
    assert torch.autograd.grad(recorded.sum(), x)[0].isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), recorded, rtol=1e-5, atol=1e-4)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        assert layer(x[:, :0]).shape == (2, 0, 10_000)


def test_the_embedded_model_in_its_own_blocks_gives_the_tokens_of_float32_in_a_fifth_of_the_memory(
    embedded: Any,
) -> None:
    model, tokenizer = embedded
    packed, _ = hf_parallel.load_embedded_model(weights="packed")
    assert packed.lm_head.packed is packed.model.embed_tokens.packed
    assert packed.get_memory_footprint() < 0.2 * model.get_memory_footprint()
    assert fingerprint(packed) != fingerprint(model)
    prompts = [tokenizer(question, return_tensors="pt").input_ids[0] for question in QUESTIONS]
    ids, mask = tiny.left_pad(prompts)
    inputs: Any = {"input_ids": ids, "attention_mask": mask}
    settings: Any = {"generation_mode": "shared_prefix", "max_new_tokens": 16, "do_sample": False}
    found = [hf_parallel.enable(one).generate(**inputs, **settings) for one in (packed, model)]
    assert torch.equal(*found)
    with torch.no_grad(), linear_layers(model):
        logits = [one(input_ids=found[0], logits_to_keep=4).logits for one in (packed, model)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_64_greedy_tokens_of_packed_weights_differ_from_those_of_float32_in_ties_only(embedded: Any) -> None:
    model, tokenizer = embedded
    packed, _ = hf_parallel.load_embedded_model(weights="packed")
    questions = [f"{question} {more}" for question in QUESTIONS for more in ("", "Be brief.", "Explain in detail.")]
    prompts = [tokenizer(question, return_tensors="pt").input_ids[0] for question in questions]
    ids, mask = tiny.left_pad(prompts)
    inputs: Any = {"input_ids": ids, "attention_mask": mask, "generation_mode": "shared_prefix"}
    settings: Any = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    found, expected = (
        hf_parallel.enable(one).generate(**inputs, **settings)[:, ids.shape[1] :] for one in (packed, model)
    )
    for prompt, tokens, others in zip(prompts, found, expected, strict=True):
        for place in (tokens != others).nonzero()[:1].flatten().tolist():  # later ones follow from the first
            with torch.no_grad():
                logits = model(torch.cat([prompt, others[:place]])[None]).logits[0, -1]
            assert logits.max() - logits[tokens[place]] < 1e-4


def test_rows_with_activations_in_8_bits_are_independent_and_close_to_float32(embedded: Any) -> None:
    exact, tokenizer = embedded
    model, _ = hf_parallel.load_embedded_model(weights="packed_int8")
    hf_parallel.enable(model)
    assert model.lm_head.int8  # probing restores it
    prompts = [tokenizer(question, return_tensors="pt").input_ids[0] for question in QUESTIONS]
    ids, mask = tiny.left_pad(prompts)
    settings: Any = {"generation_mode": "shared_prefix", "max_new_tokens": 8, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, **settings)
    with Engine(model) as engine:
        assert torch.equal(engine.submit(ids, attention_mask=mask, **settings).result().sequences, found)
    with torch.no_grad():
        own, expected = (one(input_ids=found[-1:]).logits[:, -8:].softmax(-1) for one in (model, exact))
    assert 1e-5 < float((own - expected).abs().sum(-1).mean()) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_in_memory_and_is_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = tiny.build("qwen2", dtype=dtype)  # with biases
    plain.save_pretrained(tmp_path / "plain")
    model: Any = type(plain).from_pretrained(tmp_path / "plain", dtype="auto")
    pack_half(model)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert model.dtype == torch.float32
    hf_parallel.enable(model)
    model.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.stack(tiny.make_prompts([9, 9], seed=3))
    settings: Any = {"generation_mode": "shared_prefix", "max_new_tokens": 8, "do_sample": False}
    expected = hf_parallel.enable(again).generate(ids, **settings)
    assert torch.equal(model.generate(ids, **settings), expected)
    with Engine(model) as engine:
        assert torch.equal(engine.submit(ids, **settings).result().sequences, expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, again(ids).logits, rtol=0, atol=1e-4)


def test_what_cannot_be_packed_raises(embedded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has none \(torch.float32\)"):
        pack_half(tiny.build("llama"))
    with pytest.raises(ValueError, match=r"was saved in torch.bfloat16: use weights='packed'"):
        pack_half(tiny.build("llama", dtype=torch.bfloat16), int8=True)
    with pytest.raises(ValueError, match="float32 on a CPU, got dtype=torch.bfloat16"):
        load_model(None, torch.bfloat16, weights="packed")
    with pytest.raises(
        ValueError, match="weights must be 'packed', 'packed_int8', a quantization config or None, got 'int4'"
    ):
        load_model(None, weights="int4")
    assert main(["generate", "Hello", "--weights", "packed", "--dtype", "float16"]) == 2
    assert "float32 on a CPU" in capsys.readouterr().err


@pytest.mark.skipif(native.has_bfloat16(), reason="PyTorch computes bfloat16 on this processor")
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_bfloat16_layers_round_the_results_of_float32(tokens: int) -> None:
    layer = nn.Linear(512, 300, dtype=torch.bfloat16)
    x = torch.randn(tokens, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        with linear_layers(nn.ModuleList([layer])):
            assert "forward" in vars(layer)
            found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
