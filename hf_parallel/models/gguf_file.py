"""Reads a GGUF file for a model of Transformers: the blocks of weights as they are, by the names of layers.

Needs the packages gguf, which knows the names of tensors, and accelerate. `ARCHITECTURES` store layers as Transformers
does, except for the rotated dimensions of llama.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_parallel.kernels import native

ARCHITECTURES = ("llama", "qwen2", "qwen3")
Blocks = dict[str, tuple[str, torch.Tensor]]
"""Packing (`native.PACKINGS`) and uint8 `[out_features, bytes]` by the name of a parameter."""


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a path names: itself, or the only one of a folder without a config.json."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists() and len(files := [*path.glob("*.gguf")]) == 1:
        return files[0]
    return path if path.suffix == ".gguf" and path.is_file() else None


def read_gguf(file: Path, model: PreTrainedModel) -> tuple[Blocks, dict[str, torch.Tensor]]:
    """Return the matrices of a file in blocks that a kernel unpacks, and its other weights in float32.

    Raises `ValueError` if its architecture is not in `ARCHITECTURES`, or it has no tensor for a parameter of `model`.
    """
    import gguf

    reader, config = gguf.GGUFReader(file), model.config
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{file}: packed architectures are {list(ARCHITECTURES)}, got {architecture!r}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads: dict[str, int] = {}
    if architecture == "llama":  # llama.cpp interleaves the halves of rotated dimensions
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    blocks: Blocks = {}
    weights: dict[str, torch.Tensor] = {}
    for parameter in dict(model.named_parameters()):
        name, _, suffix = parameter.rpartition(".")
        if (tensor := tensors.get(f"{names.get_name(name)}.{suffix}")) is None:
            raise ValueError(f"{file} has no tensor for {parameter} of {type(model).__name__}")
        packing, data = tensor.tensor_type.name, torch.from_numpy(tensor.data.view("uint8").copy())
        is_packed = data.dim() == 2 and packing in native.PACKINGS and packing != "F32"
        if not is_packed:
            data = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if count := heads.get(tensor.name.split(".")[-2]):
            data = data.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        if is_packed:
            blocks[parameter] = packing, data
        else:
            weights[parameter] = data
    return blocks, weights


def empty_model(file: Path) -> PreTrainedModel:
    """Return the model that a file describes, with weights on the meta device."""
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model
