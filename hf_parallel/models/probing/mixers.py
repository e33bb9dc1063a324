"""Finds mixers, modules that keep a state instead of keys (`intercept/mixers.py`), by probing, not by their class.

The innermost module that is running when a state is read or written is a mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, __version__
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_parallel.cache.placement import execution_device
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.mixers import Mixer
from hf_parallel.models.intercept.modules import tensor_attributes
from hf_parallel.models.probing.signature import cache_argument, parameters_of
from hf_parallel.models.ranks import num_ranks

_READS = ("get_conv_state", "get_recurrent_state", "has_previous_state")
_WRITES = ("update_conv_state", "update_recurrent_state")
_OF_OWN_CACHES = ("get_linear_cache", "set_linear_cache")
"""Methods of a cache of a model's own, which the model demands unless `use_cache=False`."""


class StockCache(DynamicCache):
    """A stock cache that also has the methods `_OF_OWN_CACHES`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self._linear: dict[int, torch.Tensor] = {}

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a layer."""
        return self._linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """Keep the state of a layer."""
        self._linear[layer_idx] = state


def find_mixers(model: PreTrainedModel, use_cache: bool = True) -> tuple[Mixer, ...]:
    """Find the mixers of a model in two forward passes over its stock cache, of three tokens and of one.

    Raises `UnsupportedModelError` if a module reaches a state of a cache that it was not given by name.
    """
    recorder = _Recorder(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    positions = torch.arange(4, device=execution_device(model))
    inputs = {"input_ids": (vocabulary // 2 + positions) % vocabulary}
    if "position_ids" in parameters_of(model.forward):  # else image models count from where their last batch ended
        inputs["position_ids"] = positions
    attributes = [tensor_attributes(model)]  # before the passes, and after each of them
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(recorder.begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(recorder.end, always_call=True).remove)
        for tokens in (slice(3), slice(3, 4)):
            arguments: dict[str, Any] = {name: values[None, tokens] for name, values in inputs.items()}
            arguments[cache_argument(model)] = recorder
            model(**arguments, use_cache=use_cache)
            attributes.append(tensor_attributes(model))
    mixers = _mixers_without_cache(model, *attributes)
    names = {module: name for name, module in model.named_modules()}
    for (module, layer_idx), argument in recorder.arguments.items():
        if not argument:
            where = names[module] or "its forward"
            raise UnsupportedModelError(
                f"{type(model).__name__} reaches the state of layer {layer_idx} in {where}, without an argument "
                "that holds the cache"
            )
        mixers.append(Mixer(names[module], layer_idx, argument, use_cache=use_cache))
    return tuple(mixers)


def _mixers_without_cache(
    model: PreTrainedModel, before: Mapping[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[Mixer]:
    """Return the modules whose attributes changed with each of two passes, and give these their values before."""
    changed = [path for path, value in second.items() if value is not None and value is not first.get(path)]
    attributes: dict[str, list[str]] = {}  # by the name of the outermost module
    for path in sorted(changed):
        owner, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(owner), attribute, before.get(path))
        outermost = next((name for name in attributes if owner.startswith(f"{name}.")), owner)
        attributes.setdefault(outermost, []).append(path.removeprefix(f"{outermost}."))
    return [Mixer(name, _layer_in(name), "", attributes=tuple(paths)) for name, paths in attributes.items()]


def _layer_in(name: str) -> int:
    """Return the index of the layer that the name of a module has; 0 if it has none."""
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    return 0


def keeps_states(model: PreTrainedModel) -> bool:
    """Return whether layers of a model keep states, in its stock cache or in modules."""
    return bool(model._is_stateful or _state_layers(model))


def _state_layers(model: PreTrainedModel) -> list[int]:
    """Return the indices of layers that keep states in a model's stock cache."""
    layers = DynamicCache(config=model.config).layers
    return [index for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]


def supported_mixers(model: PreTrainedModel) -> tuple[Mixer, ...]:
    """Return the mixers of a model; raise `UnsupportedModelError` if it keeps states elsewhere than in the cache."""
    if not keeps_states(model):
        return ()
    name = type(model).__name__
    if not all(hasattr(DynamicCache, method) for method in _READS + _WRITES):
        raise UnsupportedModelError(
            f"{name} keeps states, which transformers {__version__} has no interface for: update it"
        )
    try:
        try:
            mixers = find_mixers(model)
        except ValueError:  # it demands a cache of its own kind
            mixers = find_mixers(model, use_cache=False)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} keeps states in a cache of its own kind; over Transformers' it fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    layers = {mixer.layer_idx for mixer in mixers}
    missing = [layer for layer in _state_layers(model) if layer not in layers]
    if missing or not mixers:
        states = f"the states of layers {missing}" if missing else "its states"
        raise UnsupportedModelError(f"{name} keeps {states} outside of the cache")
    if num_ranks(model) > 1:
        raise UnsupportedModelError(f"{name} keeps states in {mixers[0].name}, which tensor parallelism would divide")
    return mixers


class _Recorder(StockCache):
    """A stock cache that records which module reaches its states, and the argument by which it got the cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.arguments: dict[tuple[nn.Module, int], str] = {}
        """Argument of a module that holds the cache, by the module and the layer whose state it reaches."""
        self._running: list[tuple[nn.Module, str]] = []
        for name in _READS + _WRITES + _OF_OWN_CACHES:
            setattr(self, name, partial(self._record, getattr(super(), name), name in _WRITES))

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record that a module starts, and which argument holds the cache."""
        arguments = {**dict(zip(parameters_of(module.forward), args, strict=False)), **kwargs}
        name = next((name for name, value in arguments.items() if value is self), "")
        self._running.append((module, name))

    def end(self, module: nn.Module, *results: object) -> None:
        """Record that a module has ended."""
        self._running.pop()

    def _record(self, method: Callable[..., Any], writes: bool, *args: Any, **kwargs: Any) -> Any:
        layer_idx = kwargs.get("layer_idx", args[writes] if len(args) > writes else None)
        if layer_idx is not None:
            module, argument = self._running[-1]
            self.arguments.setdefault((module, layer_idx), argument)
        return method(*args, **kwargs)
