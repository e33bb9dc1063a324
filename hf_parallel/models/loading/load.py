"""Loads a model by name for commands, the demo and benchmarks: the demo model, a folder, or a model of the Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig
from transformers.models import auto
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_parallel.models.cpu.packed import check_packed, load_gguf, pack_half
from hf_parallel.models.images import image_inputs
from hf_parallel.models.loading.embedded import load_embedded_model
from hf_parallel.models.loading.gguf_file import gguf_file, load_plain, load_tokenizer, read_gguf

CONFIGS = ("config.json", "adapter_config.json")  # configs of a model and of an adapter of PEFT


def load_model(
    name: str | None,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    preset: bool = True,
    weights: str | Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in evaluation mode, and its tokenizer.

    `name` is a folder, a GGUF file, or a model id on the Hub (default: the demo model). `dtype=None`: that of the saved
    weights; the demo model has float32. `preset`: see `load_embedded_model`. `weights="packed"`: layers on a CPU stay
    in the blocks of a GGUF file, such as the demo model's, or in the half precision of the saved weights.
    `"packed_int8"`: layers in such blocks also quantize their activations to 8 bits (docs/cpu.md). A mapping is a
    quantization config of Transformers, with `quant_method`. `device="auto"`: on all, by accelerate; "tp": a part of
    each layer in each of the processes that torchrun has started, by tensor parallelism. Raises `ValueError` if the
    model is not found, or cannot be packed or quantized.
    """
    more: dict[str, Any] = {}  # arguments of `from_pretrained` that place the model
    if device == "auto" or isinstance(weights, Mapping):
        more["device_map"] = device
    if device == "tp":
        count = int(os.environ.get("WORLD_SIZE", 0))
        if count < 2:
            raise ValueError("device='tp' needs several processes, started by torchrun --nproc-per-node 2 or more")
        more = {"distributed_config": DistributedConfig(tp_size=count)}
    if more and name is None:
        raise ValueError(f"the demo model takes no weights={weights!r} with device={device!r}: name another model")
    if isinstance(weights, Mapping):
        more["quantization_config"] = AutoQuantizationConfig.from_dict(dict(weights))
        weights = None
    if name is None:
        return load_embedded_model(dtype=dtype or torch.float32, device=device, preset=preset, weights=weights)
    is_packed = check_packed(weights, dtype, device)
    is_int8 = weights == "packed_int8"
    check_model_folder("name", name)
    dtype_or_auto: Any = "auto" if is_packed or dtype is None else dtype
    model: Any
    file = gguf_file(name)
    if file is not None:
        contents = read_gguf(file)
        tokenizer = load_tokenizer(contents)
        model = load_gguf(contents, is_int8) if is_packed else load_plain(contents, dtype_or_auto, **more)
    else:
        if not Path(name).is_dir():
            _check_hub(name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except ValueError as error:
            raise ValueError(f"the tokenizer of {name!r} cannot be loaded: {error}") from error
        model = _model_class(name).from_pretrained(name, dtype=dtype_or_auto, **more)
        if is_packed:
            pack_half(model, is_int8)
    if not more:
        model.to(device)
    return model.eval(), tokenizer


def load_processor(model: PreTrainedModel, name: str | None) -> Any:
    """Return the processor of a model that reads images, from its folder or the Hub; None without a chat template."""
    if name is None or not image_inputs(model):
        return None
    processor = auto.AutoProcessor.from_pretrained(name)  # a tokenizer if there is no processor
    reads = getattr(processor, "image_processor", None) and getattr(processor, "chat_template", None)
    return processor if reads else None


def _model_class(name: str) -> Any:
    try:
        config = auto.AutoConfig.from_pretrained(name)
    except (OSError, ValueError):  # an adapter has none of its own
        return AutoModelForCausalLM
    reads = type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return auto.AutoModelForImageTextToText if reads else AutoModelForCausalLM


def check_model_folder(name: str, value: str, configs: Sequence[str] = CONFIGS) -> None:
    """Raise `ValueError` for a path that is no folder or GGUF file, and for a folder without any of `configs`."""
    if gguf_file(value) is not None:
        return
    folder = Path(value)
    is_path = value.startswith((os.sep, ".", "~"))
    if is_path and not folder.is_dir():
        raise ValueError(f"{name} {value}: no such folder or GGUF file")
    if folder.is_dir() and not any((folder / file).is_file() for file in configs):
        raise ValueError(f"{name} {value}: this folder must contain {' or '.join(configs)}")


def _check_hub(name: str) -> None:
    """Raise `ValueError` at once if the Hub cannot be reached; `from_pretrained` would retry for a minute."""
    if try_to_load_from_cache(name, "config.json") is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HfHubHTTPError:  # the Hub can be reached; `from_pretrained` reports its error
        return
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"there is no folder {name!r}, nothing of it is in the Hub's cache, and the Hub cannot be reached: {error}"
        ) from error
