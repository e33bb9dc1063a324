"""GGUF files stay packed: the model of Transformers' own reader, which unpacks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_packed import packed_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)
from transformers import modeling_gguf_pytorch_utils as stock
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_parallel
from hf_parallel.kernels import native
from hf_parallel.models.cpu.packed import PackedEmbedding, PackedLinear
from hf_parallel.models.loading import load_model
from hf_parallel.models.loading.demo_file import find_demo_file
from hf_parallel.models.loading.gguf_file import load_tokenizer, read_blocks, read_gguf
from hf_parallel.models.loading.gguf_rope import scaled_rope

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason="packed weights need a C compiler")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 128, "vocab_size": 300}


def write(
    file: Path, architecture: str, packings: list[str], is_tied: bool, add: Callable[[Any], object] = lambda _: None
) -> None:
    """Write random weights, in these formats by turns, a tokenizer of bytes, and what `add` adds to the writer."""
    config = CONFIGS[architecture](**SIZES, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    writer = gguf.GGUFWriter(file, architecture)
    add_sizes(writer, layers=2, hidden=256, heads=2, kv_heads=1, intermediate=256)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_rope_dimension_count(128)
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
    add(writer)
    finish(writer)


def add_sizes(writer: Any, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
    """Write what all architectures have, and a tokenizer of bytes."""
    writer.add_context_length(512)
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(256 + n) for n in range(256)), "Āā", "Ăă", *(f"<{n}>" for n in range(258, 300))])
    writer.add_token_types([1] * 300)
    writer.add_token_scores([-0.1 * token for token in range(300)])
    writer.add_token_merges(["Ā ā", "Ă ă"])
    writer.add_eos_token_id(299)
    writer.add_bos_token_id(298)


def finish(writer: Any) -> None:
    """Write the file."""
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
    writer.add_tensor("token_embd.weight", torch.ones(3, 32).numpy())
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    contents = read_gguf(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"a.gguf: packed architectures are .*'qwen3'.*got 'gemma2'"):
        read_blocks(contents, AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))


# The reader that Transformers gets

TEXT = "<258> Āā <299>\n\n1. don't  <259>🙂"


def add_special_tokens(writer: Any) -> None:
    """Mark two tokens as control tokens and one as user-defined, and write a chat template."""
    del writer.kv_data[0]["tokenizer.ggml.token_type"]
    writer.add_token_types([3 if token >= 298 else 4 if token == 258 else 1 for token in range(300)])
    writer.add_pad_token_id(298)
    writer.add_chat_template("{{ messages[0].content }}")


@pytest.mark.parametrize("demo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_config_and_tokenizer_are_those_of_transformers(demo: bool, tmp_path: Path) -> None:
    file = find_demo_file()[0] if demo else tmp_path / "a.gguf"
    if not demo:
        write(file, "qwen3", ["Q8_0"], True, add_special_tokens)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    contents = read_gguf(file)
    with contents.shared():
        read_config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    read_tokenizer = load_tokenizer(contents)
    assert repr(read_config) == repr(config)
    assert type(read_tokenizer) is type(tokenizer)
    assert read_tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()  # vocabulary, merges
    assert read_tokenizer.special_tokens_map == tokenizer.special_tokens_map
    assert read_tokenizer.init_kwargs == tokenizer.init_kwargs
    assert read_tokenizer(TEXT).input_ids == tokenizer(TEXT).input_ids


def test_transformers_gets_the_same_lists(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "lfm2")
    add_sizes(writer, layers=4, hidden=32, heads=2, kv_heads=1, intermediate=32)
    del writer.kv_data[0]["lfm2.attention.head_count_kv"]
    writer.add_head_count_kv([0, 2, 0, 1])
    writer.add_feed_forward_length([32])  # read as a number
    writer.add_array("tokenizer.chat_template", ["ü", "<s>"])
    writer.add_array("tokenizer.ggml.add_bos_token", [True, False])
    writer.add_tensor("token_embd.weight", torch.ones(300, 32).numpy())
    writer.add_tensor("blk.3.attn_q.weight", torch.ones(32, 32).numpy())
    finish(writer)
    expected = stock.load_gguf_checkpoint(str(file))
    with read_gguf(file).shared():
        assert repr(stock.load_gguf_checkpoint(str(file))) == repr(expected)


@pytest.mark.parametrize("weights", ["packed", None])
def test_each_load_opens_one_reader(weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.gguf", "llama", ["Q8_0"], True)
    opened: list[Path] = []
    initialize = gguf.GGUFReader.__init__

    def count(reader: Any, path: Path, *arguments: Any) -> None:
        opened.append(path)
        initialize(reader, path, *arguments)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", count)
    load_model(str(tmp_path / "a.gguf"), weights=weights)
    assert opened == [tmp_path / "a.gguf"]


def test_a_shared_reader_is_for_its_file_and_thread_until_the_end(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, "llama", ["Q8_0"], True)
    contents = read_gguf(tmp_path / "a.gguf")
    stock_class = gguf.GGUFReader
    stock_map = gguf.get_tensor_name_map

    def open_reader(name: str) -> Any:
        return gguf.GGUFReader(tmp_path / name)

    with contents.shared(), ThreadPoolExecutor() as threads:
        assert open_reader("a.gguf") is contents.reader
        assert type(open_reader("b.gguf")) is stock_class
        assert type(threads.submit(open_reader, "a.gguf").result()) is stock_class
    with pytest.raises(FileNotFoundError), contents.shared():
        open_reader("c.gguf")
    assert gguf.GGUFReader is stock_class
    assert gguf.get_tensor_name_map is stock_map


# Scaling of rotary embeddings

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128}


def frequencies(parameters: dict[str, Any], dim: int = 128) -> torch.Tensor:
    """Return the frequencies of Transformers for `rope_parameters`."""
    config = LlamaConfig(**{**SIZES, "head_dim": dim}, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))[0].double()


def factors_of(parameters: dict[str, Any], dim: int = 128) -> torch.Tensor:
    """Return the numbers that llama.cpp's converter writes for the scaling of Llama 3.1, float32."""
    plain = parameters["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
    return (plain / frequencies(parameters, dim)).float()


def add_yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_finetuned(True)


def add_attention(writer: Any) -> None:
    add_yarn(writer)
    writer.add_rope_scaling_attn_factors(0.5)
    writer.add_rope_scaling_yarn_beta_fast(16.0)


def add_linear(writer: Any) -> None:
    writer.add_rope_scaling_factor(2.5)  # without a type: linear


def add_llama3(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", factors_of({**LLAMA3, "rope_theta": 1e4}).numpy())


def add_ones(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_tensor("rope_freqs.weight", torch.ones(64).numpy())


SCALED: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "llama3": (add_llama3, LLAMA3),
    "yarn": (add_yarn, YARN),
    "attention": (add_attention, {**YARN, "beta_fast": 16.0, "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1)}),
    "linear": (add_linear, {"rope_type": "linear", "factor": 2.5}),
    "ones": (add_ones, {"rope_type": "default"}),
}


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("scaling", SCALED)
def test_rope_scaling_gives_the_logits_of_transformers_packed_and_plain(
    architecture: str, scaling: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    add, parameters = SCALED[scaling]
    write(tmp_path / "a.gguf", architecture, ["Q8_0"], True, add)
    plain, _ = load_model(str(tmp_path / "a.gguf"))
    packed, _ = load_model(str(tmp_path / "a.gguf"), weights="packed")
    expected_model = AutoModelForCausalLM.from_config(
        CONFIGS[architecture](**SIZES, rope_parameters={**parameters, "rope_theta": 1e4}, max_position_embeddings=512)
    )
    expected_model.load_state_dict(plain.state_dict())
    ids = torch.randint(290, (1, 200))
    with torch.no_grad():
        expected = expected_model.eval()(ids).logits
        for model in (plain, packed):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-3 * expected.abs().max().item())
    packed.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


OTHER_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
OTHER_SIZES |= {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1 + n / 8 for n in range(8)], "rope_theta": 1e4}
LONGROPE |= {"long_factor": [2.0 + n for n in range(8)], "original_max_position_embeddings": 64}


def phi3(writer: Any) -> PreTrainedModel:
    """Write the scaling and window of a Phi-3, and return a model with these."""
    writer.add_sliding_window(100)
    writer.add_rope_dimension_count(16)
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_rope_scaling_orig_ctx_len(64)
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", torch.tensor(LONGROPE[f"{kind}_factor"]).numpy())
    rope = {**LONGROPE, "attention_factor": 1.25}
    sizes = {**OTHER_SIZES, "num_hidden_layers": 2, "sliding_window": 100, "original_max_position_embeddings": 64}
    return Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=rope, tie_word_embeddings=False))


def gemma3(writer: Any) -> PreTrainedModel:
    """Write the scaling of a Gemma 3, which is that of its global layers, and return a model with it."""
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(32)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    sizes = {**OTHER_SIZES, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 32}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, rope_parameters=rope))


@pytest.mark.slow
@pytest.mark.parametrize("make", [phi3, gemma3])
def test_other_architectures_are_scaled_plainly(make: Callable[[Any], PreTrainedModel], tmp_path: Path) -> None:
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", make.__name__)
    model: Any = make(writer).eval()
    layers = model.config.num_hidden_layers
    add_sizes(writer, layers, hidden=64, heads=4, kv_heads=2, intermediate=128)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, make.__name__.upper()), layers)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(0, 0.3)
            stored = parameter + 1 if make is gemma3 and "norm" in name else parameter.clone()
        layer, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(layer)}.{suffix}", stored.numpy())
    finish(writer)
    ids = torch.randint(290, (1, 200))
    plain, _ = load_model(str(tmp_path / "a.gguf"))
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(plain(ids).logits, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


@settings(max_examples=30, deadline=None)
@given(
    factor=st.floats(1.5, 64),
    high=st.floats(1.5, 16),
    original=st.integers(64, 65536),
    theta=st.floats(5e3, 5e6),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
)
def test_factors_of_llama_3_give_its_frequencies(
    factor: float, high: float, original: int, theta: float, dim: int
) -> None:
    sizes = {"factor": factor, "high_freq_factor": high, "original_max_position_embeddings": original}
    parameters = {**LLAMA3, **sizes, "rope_theta": theta}
    factors = factors_of(parameters, dim)
    inside = ((factors > 1.001) & (factors < 0.999 * factors.max())).sum()
    assume(inside > 1 or high == 4)  # fewer do not tell where the scaling ends
    found = scaled_rope({}, {"rope_freqs.weight": factors.numpy()}, theta, dim)
    torch.testing.assert_close(frequencies(found, dim), frequencies(parameters, dim), rtol=1e-5, atol=0)


def test_the_scaling_of_llama_3_is_found_as_published() -> None:
    for factor, original, dim in ((8.0, 8192, 128), (32.0, 8192, 64), (16.0, 4096, 96)):
        parameters = {**LLAMA3, "factor": factor, "original_max_position_embeddings": original, "rope_theta": 5e5}
        factors = factors_of(parameters, dim).numpy()
        assert scaled_rope({}, {"rope_freqs.weight": factors}, 5e5, dim) == parameters


# Keys and tensors that are not known

UNKNOWN: dict[str, Callable[[Any], object]] = {
    "llama.attention.clamp_kqv=8.0": lambda writer: writer.add_clamp_kqv(8.0),
    "llama.logit_scale=0.5": lambda writer: writer.add_logit_scale(0.5),
    "llama.attention.sliding_window=64": lambda writer: writer.add_sliding_window(64),
    "llama.attention.value_length=64": lambda writer: writer.add_uint32("llama.attention.value_length", 64),
    "llama.rope.dimension_count=64": lambda writer: writer.add_rope_dimension_count(64),
    "llama.expert_count=8": lambda writer: writer.add_expert_count(8),
    "llama.something.new=1": lambda writer: writer.add_uint32("llama.something.new", 1),
    "rope.scaling.yarn_log_multiplier=0.1": lambda writer: writer.add_rope_scaling_yarn_log_mul(0.1),
    "rope.scaling.type='longrope' is not|rope_factors_long.weight is missing": lambda writer: (
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    ),
    "rope.scaling.factor must be a positive number, got -2.0": lambda writer: writer.add_rope_scaling_factor(-2.0),
    "tensor blk.0.attn_q.bias": lambda writer: writer.add_tensor("blk.0.attn_q.bias", torch.ones(256).numpy()),
    "tensor output_norm.bias": lambda writer: writer.add_tensor("output_norm.bias", torch.ones(256).numpy()),
    "rope_freqs.weight holds factors that no": lambda writer: writer.add_tensor(
        "rope_freqs.weight", torch.linspace(1, 8, 64).numpy()
    ),
    "rope_freqs.weight must hold 64": lambda writer: writer.add_tensor("rope_freqs.weight", torch.ones(32).numpy()),
    "split.count": lambda writer: writer.add_uint16("split.count", 2),
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_what_may_change_results_and_is_not_known_raises_by_name(message: str, tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if key in message:
                del writer.kv_data[0][key]
        UNKNOWN[message](writer)

    write(tmp_path / "a.gguf", "llama", ["Q8_0"], True, add)
    for weights in ("packed", None):
        with pytest.raises(ValueError, match=f"a.gguf: .*({message})"):
            load_model(str(tmp_path / "a.gguf"), weights=weights)


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_sliding_window(512)
        writer.add_expert_count(0)
        writer.add_causal_attention(True)
        writer.add_rope_scaling_factor(1.0)
        writer.add_string("quantizer.version", "any")

    write(tmp_path / "a.gguf", "llama", ["Q8_0"], True, add)
    model, _ = load_model(str(tmp_path / "a.gguf"))
    assert model.config.rope_parameters["rope_type"] == "default"


def test_a_missing_weight_raises_by_name(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        del writer.tensors[0]["blk.1.ffn_norm.weight"]

    write(tmp_path / "a.gguf", "llama", ["Q8_0"], True, add)
    for weights in ("packed", None):
        with pytest.raises(ValueError, match=r"it has no tensor blk.1.ffn_norm.weight"):
            load_model(str(tmp_path / "a.gguf"), weights=weights)


# Damaged files


def damaged(data: bytes, header: int, random: Random) -> bytes:
    """Cut a file off, or overwrite bytes before its tensors."""
    if random.random() < 0.3:
        return data[: random.choice([random.randrange(header), random.randrange(len(data))])]
    changed = bytearray(data)
    for _ in range(random.choice([1, 4])):
        changed[random.randrange(random.choice([header, min(header, 1500)]))] = random.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_files_load_or_raise_value_error(count: int, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write(file, "llama", ["Q8_0", "Q4_0"], True)
    data, header, random = file.read_bytes(), gguf.GGUFReader(file).data_offset, Random(count)
    refused = 0
    for number in range(count):
        file.write_bytes(damaged(data, header, random))
        try:
            load_model(str(file), weights=(None, "packed")[number % 2])
        except ValueError:
            refused += 1
    assert refused > count // 2
