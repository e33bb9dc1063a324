"""The LoRA adapter of PEFT that a forward pass uses, as attributes of the adapted layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def adapter_active(layers: Sequence[Any], adapter: str, is_disabled: bool) -> Iterator[None]:
    """Let adapted layers use one adapter in this context, or none if `is_disabled`. All threads see it.

    PEFT's own methods would, in each pass, also set which weights of all adapters require gradients. So its attributes
    are set, past the layers' `__setattr__`.
    """
    values_before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            _set(layer, [adapter], is_disabled)
        yield
    finally:
        for layer, values in zip(layers, values_before, strict=True):
            _set(layer, *values)


def _set(layer: Any, active_adapter: Any, disable_adapters: bool) -> None:
    attributes = vars(layer)
    attributes["_active_adapter"] = active_adapter
    attributes["_disable_adapters"] = disable_adapters
