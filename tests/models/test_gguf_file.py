"""GGUF files stay packed: the model of Transformers' own reader, which unpacks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_packed import packed_weights
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen3Config

import hf_parallel
from hf_parallel.kernels import native
from hf_parallel.models.gguf_file import read_gguf
from hf_parallel.models.loading import load_model
from hf_parallel.models.packed import PackedEmbedding, PackedLinear

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason="packed weights need a C compiler")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 128, "vocab_size": 300}


def write(file: Path, architecture: str, packings: list[str], is_tied: bool) -> None:
    """Write random weights, in these formats by turns, and a tokenizer of bytes."""
    config = CONFIGS[architecture](**SIZES, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_block_count(2)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_rope_dimension_count(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(256 + n) for n in range(256)), "Āā", *(f"<{n}>" for n in range(257, 300))])
    writer.add_token_types([1] * 300)
    writer.add_token_merges(["Ā ā"])
    writer.add_eos_token_id(299)
    writer.add_bos_token_id(298)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 2)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        packing, (layer, _, suffix) = packings[number % len(packings)], name.rpartition(".")
        target = f"{names.get_name(layer)}.{suffix}"
        if parameter.dim() == 1:
            writer.add_tensor(target, torch.rand(parameter.shape).add(0.5).numpy())
            continue
        weights, _ = packed_weights(packing, *parameter.shape)
        kind = gguf.GGMLQuantizationType[packing]
        writer.add_tensor(target, weights.view(torch.uint8).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "packings", "is_tied"),
    [
        ("llama", ["Q8_0", "Q4_0", "Q4_1"], True),
        ("qwen2", ["Q4_K", "Q6_K", "Q5_0"], False),  # no kernel unpacks Q5_0
        ("qwen3", ["Q5_K", "F16", "BF16", "Q6_K"], True),
    ],
)
def test_a_packed_file_gives_the_logits_and_tokens_of_the_unpacked_one(
    architecture: str, packings: list[str], is_tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    write(tmp_path / "a.gguf", architecture, packings, is_tied)
    packed, tokenizer = load_model(str(tmp_path), weights="packed")
    plain, _ = load_model(str(tmp_path / "a.gguf"))
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    kinds = {module.packing for module in packed.modules() if isinstance(module, PackedLinear | PackedEmbedding)}
    assert kinds == {packing for packing in packings if packing in native.PACKINGS}
    ids = torch.randint(290, (2, 9))
    with torch.no_grad():
        expected = plain(ids).logits
        torch.testing.assert_close(packed(ids).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    hf_parallel.enable(packed)
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(packed.generate(ids, generation_mode="shared_prefix", **given), plain.generate(ids, **given))


def test_an_architecture_whose_names_are_not_known_raises(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma2")
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    with pytest.raises(ValueError, match=r"packed architectures are .*'qwen3'.*got 'gemma2'"):
        read_gguf(tmp_path / "a.gguf", AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
