"""LoRA adapters of PEFT: which of them a forward pass can use, and how they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_parallel.cache.fingerprint import adapter_layers

BASE_MODEL = "__base__"
"""Name of the model without adapters, as in PEFT's `adapter_names`."""
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
)
"""Settings of LoRA that change more than linear layers, or depend on other tokens or adapters."""


def check_adapter(model: Any, name: object) -> None:
    """Raise `ValueError` if passes cannot be switched to an adapter, which may be `BASE_MODEL`."""
    configs = getattr(model, "peft_config", None) or {}
    names = [BASE_MODEL, *configs]
    if name not in names:
        raise ValueError(f"adapter must be one of {names}, got {name!r}")
    for other, config in configs.items():  # those not chosen must be switched off
        if config.peft_type != "LORA":
            raise ValueError(f"adapter {other!r} must be a LoRA adapter, got {config.peft_type}")
        settings = [field for field in _UNSUPPORTED if getattr(config, field, None)]
        if settings or config.bias != "none":
            raise ValueError(f"adapter {other!r} may change linear layers only, its config has {settings or ['bias']}")
    decoder = {*(model.get_decoder() or model).modules()}
    for layer in adapter_layers(model):
        if layer.merged_adapters:
            raise ValueError(f"adapters {layer.merged_adapters} are merged into the weights: call unmerge_adapter()")
        if layer not in decoder or isinstance(layer.get_base_layer(), nn.Embedding):
            path = next(path for path, module in model.named_modules() if module is layer)
            raise ValueError(f"an adapter may change linear layers of the decoder only, but one changes {path}")


def check_no_virtual_tokens(model: object) -> None:
    """Raise `ValueError` for PEFT's prompt learning, whose virtual tokens are lost where token ids are passed."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("the model has virtual tokens (PEFT's prompt learning), which are not supported here")


def load_adapters(model: Any, paths: Mapping[str, str]) -> Any:
    """Load LoRA adapters by name, from folders or the Hub, into a model. Return the `PeftModel`, with none active.

    Raises `ValueError` for a name that PEFT does not allow, and for an adapter that changes more than the decoder.
    """
    from peft import PeftModel, load_peft_weights

    adapted: Any = None
    for name, path in paths.items():
        if not name or "." in name or name == BASE_MODEL:
            raise ValueError(f"an adapter's name must have no '.' and not be {BASE_MODEL!r}, got {name!r}")
        if adapted is None:
            adapted = PeftModel.from_pretrained(model, path, name)
        else:
            adapted.load_adapter(path, name)
        check_adapter(adapted, name)
        others = sorted(key for key in load_peft_weights(path, "cpu") if "lora_" not in key)
        if others:
            raise ValueError(f"{path} must hold weights of LoRA only, got {others[:3]}")
    adapted.base_model.disable_adapter_layers()
    return adapted.eval()
