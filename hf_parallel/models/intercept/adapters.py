"""LoRA adapters of PEFT: each forward pass uses one of them, or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_parallel.cache import ForwardPass
from hf_parallel.cache.fingerprint import adapter_layers
from hf_parallel.models.decode.cached_model import CachedModel

BASE_MODEL = "__base__"
"""Name of the model without adapters, as in PEFT's `adapter_names`."""
_UNSUPPORTED = (
    *("alora_invocation_tokens", "arrow_config", "layer_replication"),
    *("modules_to_save", "target_parameters", "trainable_token_indices"),
)
"""Settings of LoRA that change more than linear layers, or depend on other tokens or adapters."""


class AdaptedModel(CachedModel):
    """A model over a block cache whose passes may each use another adapter."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._models = defaultdict[str, CachedModel](lambda: CachedModel(*arguments, **settings))  # own CUDA graphs
        self._adapters, self._checked = adapter_layers(self.model), {None}

    def check(self, adapter: Any) -> None:
        """Raise `ValueError` if passes cannot be switched to an adapter. See `check_adapter`, which is slow."""
        if not isinstance(adapter, str | None) or adapter not in self._checked:
            check_adapter(self.model, adapter)
            self._checked.add(adapter)

    def logits(
        self, forward: ForwardPass, ids: torch.Tensor, keep: Sequence[int] | None, adapter: str | None = None
    ) -> torch.Tensor:
        """Run a pass as `CachedModel.logits` does, with an adapter, `BASE_MODEL`, or those active (None)."""
        if adapter is None:
            return super().logits(forward, ids, keep)
        self.check(adapter)  # it may have been deleted since its request was submitted
        # PEFT's own methods would, in each pass, also set which weights of all adapters require gradients.
        chosen = {"_active_adapter": [adapter], "_disable_adapters": adapter == BASE_MODEL}
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._adapters]
        try:
            for layer in self._adapters:  # other threads see it, too
                layer.__dict__.update(chosen)
            return self._models[adapter].logits(forward, ids, keep)
        finally:
            for layer, values in zip(self._adapters, before, strict=True):
                layer.__dict__["_active_adapter"], layer.__dict__["_disable_adapters"] = values


def check_adapter(model: Any, name: object) -> None:
    """Raise `ValueError` if passes cannot be switched to an adapter, which may be `BASE_MODEL`."""
    configs = getattr(model, "peft_config", None) or {}
    if name not in (known := [BASE_MODEL, *configs]):
        raise ValueError(f"adapter must be one of {known}, got {name!r}")
    for other, config in configs.items():  # those not chosen must be switched off
        if config.peft_type != "LORA":
            raise ValueError(f"adapter {other!r} must be a LoRA adapter, got {config.peft_type}")
        given = [field for field in _UNSUPPORTED if getattr(config, field, None)]
        if given or config.bias != "none":
            raise ValueError(f"adapter {other!r} may change linear layers only, its config has {given or ['bias']}")
    decoder, paths = {*(model.get_decoder() or model).modules()}, {one: path for path, one in model.named_modules()}
    for layer in adapter_layers(model):
        if layer.merged_adapters:
            raise ValueError(f"adapters {layer.merged_adapters} are merged into the weights: call unmerge_adapter()")
        if layer not in decoder or isinstance(layer.get_base_layer(), nn.Embedding):
            raise ValueError(f"an adapter may change linear layers of the decoder only, but one changes {paths[layer]}")


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
        if others := sorted(key for key in load_peft_weights(path, "cpu") if "lora_" not in key):
            raise ValueError(f"{path} must hold weights of LoRA only, got {others[:3]}")
    adapted.base_model.disable_adapter_layers()
    return adapted.eval()
