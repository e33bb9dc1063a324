"""GGUF files with random weights in the shape of known models, for `python -m benchmarks engines --shape`.

A file has the tokenizer and the tensor formats of the demo model's file, so that results of the two models differ by
their shapes alone. Weights are drawn with the standard deviation with which Transformers initializes models. Writing
needs the package gguf.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from benchmarks.gpu_parts.models import CONFIGS, head_dim
from hf_parallel.files import atomic_file, cache_folder
from hf_parallel.models.loading.demo_file import find_demo_file
from hf_parallel.models.loading.gguf_file import ARCHITECTURES
from hf_parallel.progress import progress_bar

VOCABULARY = 49_152
"""Tokens of the demo model. A shape has at least as many; the file names the others, and no text contains them."""
SHAPES = [
    name for name, config in CONFIGS.items() if config.model_type in ARCHITECTURES and config.vocab_size >= VOCABULARY
]
"""Names of `gpu_parts/shapes.json` that can be written."""
DEVIATION = 0.02
SEED = 0
FORMAT_VERSION = 1
"""Must be increased when the output of `write` changes; files of older formats are then ignored."""


def random_model(name: str) -> Path:
    """Return the GGUF file of a shape in the cache folder, and write it first if there is none.

    Raises `ValueError` for a name that is not in `SHAPES`.
    """
    if name not in SHAPES:
        raise ValueError(f"shape must be one of {SHAPES}, got {name!r}")
    file = cache_folder() / "shapes" / f"{name}-format{FORMAT_VERSION}.gguf"
    if not file.exists():
        print(f"Writing {file} (once, random weights)", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as temporary:
            write(CONFIGS[name], temporary, f"{name}, random weights")
    return file


def write(config: PreTrainedConfig, file: Path, title: str = "random weights") -> None:
    """Write a model with random weights: the same bytes each time.

    Norms are 1, biases 0, and matrices normally distributed, then quantized. Their formats are those of the demo
    model's file. An output matrix, which that file lacks, has the format of the embedding.

    Parameters
    ----------
    config : PreTrainedConfig
        Shape of the model. Its type is one of `ARCHITECTURES`, and its vocabulary has at least `VOCABULARY` tokens.
    file : Path
        Path of the file, which is overwritten.
    title : str
        Name of the model in the metadata.
    """
    import gguf

    demo = gguf.GGUFReader(find_demo_file()[0])
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_name(title)
    _add_sizes(writer, config)
    _add_tokenizer(writer, demo, config.vocab_size)
    for key in ("general.file_type", "general.quantization_version"):
        writer.add_uint32(key, demo.fields[key].contents())
    _add_tensors(writer, demo, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, demo: Any, vocab_size: int) -> None:
    """Copy the tokenizer of the demo model, and add unused tokens up to `vocab_size`, named as llama.cpp names them."""
    import gguf

    for key, field in demo.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value = field.contents()
        if key == "tokenizer.ggml.tokens":
            value += [f"[PAD{token}]" for token in range(len(value), vocab_size)]
        if key == "tokenizer.ggml.token_type":
            value += [int(gguf.TokenType.UNUSED)] * (vocab_size - len(value))
        kind, *elements = field.types
        writer.add_key_value(key, value, kind, elements[0] if elements else None)


def _add_tensors(writer: Any, demo: Any, config: Any) -> None:
    import gguf

    formats = {_kind(tensor.name): tensor.tensor_type for tensor in demo.tensors}
    formats["output.weight"] = formats["token_embd.weight"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    generator = np.random.default_rng(SEED)
    parameters = list(model.named_parameters())
    for parameter, weight in progress_bar(parameters, what="Drawing weights", unit="tensors"):
        layer, _, suffix = parameter.rpartition(".")
        name = f"{names.get_name(layer)}.{suffix}"
        if weight.dim() == 1:
            value = 1.0 if suffix == "weight" else 0.0
            writer.add_tensor(name, np.full(weight.shape, value, dtype=np.float32))
            continue
        matrix = generator.standard_normal(weight.shape, dtype=np.float32) * np.float32(DEVIATION)
        kind = formats[_kind(name)]
        writer.add_tensor(name, gguf.quantize(matrix, kind), raw_dtype=kind)


def _kind(name: str) -> str:
    """Return the name of a tensor without the number of its layer."""
    return re.sub(r"^blk\.\d+\.", "", name)
