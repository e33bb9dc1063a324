"""Loads GGUF files into models of Transformers, plainly, or with blocks of weights as they are.

Transformers ignores keys and tensors that it does not know. Here, the ones that scale RoPE are read (`gguf_rope.py`),
and all others that may change results raise an error. Needs the packages gguf and accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as stock
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from hf_parallel.kernels import native
from hf_parallel.models.loading.gguf_rope import is_scaling, scaled_rope
from hf_parallel.progress import progress_bar

if TYPE_CHECKING:
    from hf_parallel.models.loading.gguf_reader import GGUF

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that store layers as Transformers does, except for the rotated dimensions of llama."""
Blocks = dict[str, tuple[str, torch.Tensor]]
"""Packing (`native.PACKINGS`) and uint8 `[out_features, bytes]` by the name of a parameter."""
_OWN_KEYS = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys that Transformers does not read in every architecture, with the names in its configs."""
_ALL_SLIDING = ("mistral", "phi3", "starcoder2")
"""Types of models whose window is that of all layers, and which Transformers does not read."""


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a path names: itself, or the only one of a folder without a config.json."""
    path = Path(name)
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if path.is_dir() and not (path / "config.json").exists():
        files = [*path.glob("*.gguf")]
        if len(files) == 1:
            return files[0]
    return None


@contextmanager
def _errors_naming(file: Path) -> Iterator[None]:
    """Turn every error of a damaged file into a `ValueError` that names it; libraries raise any kind."""
    try:
        yield
    except (ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{file}: {kind}{error}") from error


def read_gguf(file: Path) -> GGUF:
    """Read a file's metadata, and where its tensors are. Raises `ValueError` if it is damaged, or holds no model."""
    with _errors_naming(file):
        from hf_parallel.models.loading.gguf_reader import read

        return read(file)


def load_tokenizer(contents: GGUF, **more: Any) -> Any:
    """Load the tokenizer of a file. Raises `ValueError` if the file is damaged."""
    file = contents.file
    with _errors_naming(file), contents.shared():
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **more)


def load_plain(contents: GGUF, dtype: torch.dtype | None, **more: Any) -> PreTrainedModel:
    """Load a model with all weights unpacked, in any architecture that Transformers reads.

    Raises `ValueError` if the file is damaged, lacks a weight, or has a key or tensor that may change results and that
    neither Transformers nor this package knows.
    """
    file = contents.file
    with _errors_naming(file), contents.shared():
        config = _config(contents)
        model = _empty_model(config)
        if contents.architecture in ARCHITECTURES:
            _tensor_names(contents, model)
        else:
            processor_class = stock.TENSOR_PROCESSORS.get(contents.architecture, stock.TensorProcessor)
            known = stock.get_gguf_hf_weights_map(model, processor_class(config=config.to_dict()))
            contents.check_tensors(lambda name: name in known or name == "output.weight")
        stock_class: Any = AutoModelForCausalLM
        loaded, info = stock_class.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=dtype, output_loading_info=True, **more
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"it has no tensor for {missing[0]}")
        return loaded  # type: ignore[no-any-return]


def read_blocks(contents: GGUF, model: PreTrainedModel) -> tuple[Blocks, dict[str, torch.Tensor]]:
    """Return the matrices of a file in blocks that a kernel unpacks, and its other weights in float32.

    Raises `ValueError` as `load_plain`, and if the architecture is not in `ARCHITECTURES`.
    """
    with _errors_naming(contents.file):
        return _blocks(contents, model)


def load_empty(contents: GGUF) -> tuple[PreTrainedModel, Blocks, dict[str, torch.Tensor]]:
    """Return the model that a file describes, with weights on the meta device, and what `read_blocks` returns."""
    with _errors_naming(contents.file), contents.shared():
        _check_architecture(contents)
        model = _empty_model(_config(contents))
        blocks, weights = _blocks(contents, model)
        return model, blocks, weights


def _check_architecture(contents: GGUF) -> None:
    if contents.architecture not in ARCHITECTURES:
        raise ValueError(f"packed architectures are {list(ARCHITECTURES)}, got {contents.architecture!r}")


def _config(contents: GGUF) -> PreTrainedConfig:
    """Return the config that Transformers reads, completed by sizes and RoPE scaling."""
    metadata = contents.metadata
    config: Any = AutoConfig.from_pretrained(contents.file.parent, gguf_file=contents.file.name)
    mapping: Any = GGUF_CONFIG_MAPPING  # of several types of values
    read: Mapping[str, Any] = mapping.get(config.model_type.removesuffix("_text"), {})
    added = {key: name for key, name in _OWN_KEYS.items() if not read.get(key)}
    if config.model_type in _ALL_SLIDING:
        added["attention.sliding_window"] = "sliding_window"
    for key, name in added.items():
        if key in metadata:
            setattr(config, name, metadata[key] or None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = parameters.get("full_attention", parameters)  # llama.cpp scales no others
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    implied = {
        "attention.value_length": metadata.get("attention.key_length", head_dim),
        "rope.dimension_count": rotary_dim,
    }
    context_length = metadata.get("context_length", 0)

    def is_known(key: str) -> bool:
        value = metadata[key]
        if key in implied:
            return bool(value == implied[key])
        if read.get(key) or key in added:
            return True
        return key == "attention.sliding_window" and bool(value >= context_length)

    contents.check_keys(is_known)
    scaling = sorted({*filter(is_scaling, metadata), *contents.rope_tensors})
    if not scaling:
        return config  # type: ignore[no-any-return]
    if "rope_theta" not in rope:
        raise ValueError(f"{scaling[0]} is not supported in the architecture {contents.architecture!r}")
    rope.update(scaled_rope(metadata, contents.rope_tensors, rope["rope_theta"], rotary_dim))
    original = "original_max_position_embeddings"
    if original in rope and hasattr(config, original):  # Phi-3 has it twice
        setattr(config, original, rope[original])
    return config  # type: ignore[no-any-return]


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    from accelerate import init_empty_weights

    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def _tensor_names(contents: GGUF, model: PreTrainedModel) -> dict[str, str]:
    """Return the name of each parameter's tensor.

    Raises `ValueError` if it is missing or of another shape, or if the file has more tensors.
    """
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == contents.architecture)
    known = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    names: dict[str, str] = {}
    for parameter, weight in model.named_parameters():
        layer, _, suffix = parameter.rpartition(".")
        name = f"{known.get_name(layer)}.{suffix}"
        if contents.shape(name) != weight.shape:
            raise ValueError(f"the tensor {name} has shape {contents.shape(name)}, {parameter} {tuple(weight.shape)}")
        names[parameter] = name
    contents.check_tensors(lambda name: name in names.values())
    return names


def _blocks(contents: GGUF, model: PreTrainedModel) -> tuple[Blocks, dict[str, torch.Tensor]]:
    import gguf

    _check_architecture(contents)
    heads: dict[str, int] = {}
    if contents.architecture == "llama":  # llama.cpp interleaves the halves of rotated dimensions
        heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    blocks: Blocks = {}
    weights: dict[str, torch.Tensor] = {}
    names = _tensor_names(contents, model)
    for parameter, name in progress_bar(names.items(), total=len(names), what="Reading weights", unit="tensors"):
        tensor = contents.tensors[name]
        packing = tensor.tensor_type.name
        data = torch.from_numpy(tensor.data.view("uint8").copy())
        is_packed = data.dim() == 2 and packing in native.PACKINGS and packing != "F32"
        if not is_packed:
            data = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        num_heads = heads.get(name.split(".")[-2])
        if num_heads:
            data = data.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if is_packed:
            blocks[parameter] = (packing, data)
        else:
            weights[parameter] = data
    return blocks, weights
