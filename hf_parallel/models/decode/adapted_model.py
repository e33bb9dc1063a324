"""AdaptedModel: forward passes over packed tokens, each of which uses one LoRA adapter, or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hf_parallel.cache import ForwardPass
from hf_parallel.cache.fingerprint import adapter_layers
from hf_parallel.models.decode.cached_model import CachedModel
from hf_parallel.models.intercept.adapters import adapter_active
from hf_parallel.models.loading.adapters import BASE_MODEL, check_adapter


class AdaptedModel(CachedModel):
    """A model over a block cache whose passes may each use another adapter."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._layers_with_adapters = adapter_layers(self.model)
        self._checked: set[str | None] = {None}
        self._models = defaultdict[str, CachedModel](lambda: CachedModel(*arguments, **settings))
        """By adapter, as each has CUDA graphs of its own."""

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
        with adapter_active(self._layers_with_adapters, adapter, is_disabled=adapter == BASE_MODEL):
            return self._models[adapter].logits(forward, ids, keep)
