"""Mixers: modules that keep a state instead of keys, such as linear attention, SSMs and short convolutions.

They reach the cache by `get_conv_state`, `update_recurrent_state` and the like, and see a batch of rows. They are found
by probing, not by their class: the innermost module that is running when a state is read or written is a mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, __version__
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_parallel.cache import BlockCache
from hf_parallel.cache.placement import execution_device
from hf_parallel.cache.state_plan import StateCall
from hf_parallel.models.decode.compiled import InstalledCall
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.probing.signature import CACHE, parameters_of
from hf_parallel.models.ranks import num_ranks

_READS = ("get_conv_state", "get_recurrent_state", "has_previous_state")
_WRITES = ("update_conv_state", "update_recurrent_state")
_OWN = ("get_linear_cache", "set_linear_cache")
"""Methods of a cache of a model's own, which the model demands unless `use_cache=False`."""


@dataclass(frozen=True)
class Mixer:
    """A module that keeps a state."""

    name: str  # in `model.named_modules()`
    layer_idx: int
    argument: str  # of its forward, that takes the cache; empty if it has none
    stepwise: bool = False  # whether it continues from a state by one token at a time only
    attributes: tuple[str, ...] = ()  # of the module or of modules in it, that hold its states instead of a cache
    use_cache: bool = True  # argument with which the model takes a cache of another kind than its own


MixerCall = Callable[[Mixer, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""(mixer, module, args, kwargs) -> what the call of the module returns."""


class MixerStates:
    """Stand-in for the cache in one call of a mixer, with the states of the rows of its batch.

    `conv` and `recurrent` are `[rows, ...]` by `state_idx`; none at all if the rows start. After the call they are the
    new states. `in_place`: whether the mixer may write to `conv`, as fused kernels for a single token do.
    """

    def __init__(
        self,
        conv: dict[int, torch.Tensor] | None = None,
        recurrent: dict[int, torch.Tensor] | None = None,
        in_place: bool = True,
    ) -> None:
        self.conv, self.recurrent, self._in_place = dict(conv or {}), dict(recurrent or {}), in_place
        self._has_previous = bool(conv or recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of the convolution, `[rows, channels, kernel_size]`."""
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state, `[rows, ...]`."""
        return self.recurrent.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the rows continue from a state."""
        return self._has_previous

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether `conv` must not be written to."""
        return not self._in_place

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Return the state followed by the new inputs `[rows, channels, tokens]`, and keep the last of them."""
        held = self.conv.get(state_idx)
        size = conv_kernel_size or (conv_states if held is None else held).shape[-1]
        if held is not None:
            full = torch.cat([held, conv_states], dim=-1)
        else:
            full = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        self.conv[state_idx] = full[..., -size:]
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Keep a recurrent state and return it."""
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states

    get_linear_cache = get_recurrent_state

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """Keep a recurrent state."""
        self.update_recurrent_state(state, layer_idx)


class StockCache(DynamicCache):
    """A stock cache that also has the methods `_OWN`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self._linear: dict[int, torch.Tensor] = {}

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a layer."""
        return self._linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """Keep the state of a layer."""
        self._linear[layer_idx] = state


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument of `model.forward` that takes the cache."""
    known = parameters_of(model.forward)
    return next((name for name in (CACHE, "cache_params") if name in known), CACHE)


def keep_states(cache: BlockCache, mixers: Sequence[Mixer]) -> None:
    """Make a cache keep the states of a model's mixers."""
    states = cache.pool.states
    states.in_use, states.stepwise = bool(mixers), any(mixer.stepwise for mixer in mixers)


def takes_use_cache(mixers: Sequence[Mixer]) -> bool:
    """Return the argument `use_cache` with which a model takes our cache."""
    return all(mixer.use_cache for mixer in mixers)


def find_mixers(model: PreTrainedModel, use_cache: bool = True) -> tuple[Mixer, ...]:
    """Find the mixers of a model in two forward passes over its stock cache, of three tokens and of one.

    Raises `UnsupportedModelError` if a module reaches a state of a cache that it was not given by name.
    """
    recorder = _Recorder(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    places = torch.arange(4, device=execution_device(model))
    inputs = {"input_ids": (vocabulary // 2 + places) % vocabulary}
    if "position_ids" in parameters_of(model.forward):  # else image models count from where their last batch ended
        inputs["position_ids"] = places
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(recorder.begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(recorder.end, always_call=True).remove)
        held = [_tensors_of(model)]
        for part in (slice(3), slice(3, 4)):
            given = {name: values[None, part] for name, values in inputs.items()}
            model(**given, use_cache=use_cache, **{cache_argument(model): recorder})
            held.append(_tensors_of(model))
    found = _holders(model, *held)
    names = {module: name for name, module in model.named_modules()}
    for (module, layer_idx), argument in recorder.found.items():
        if not argument:
            reached = f"reaches the state of layer {layer_idx} in {names[module] or 'its forward'}, without an argument"
            raise UnsupportedModelError(f"{type(model).__name__} {reached} that holds the cache")
        found.append(Mixer(names[module], layer_idx, argument, use_cache=use_cache))
    return tuple(found)


def _tensors_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the attributes of modules that are, or may become, tensors but neither parameters nor buffers."""
    return {
        f"{name}.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if value is None or isinstance(value, torch.Tensor)
    }


def _holders(
    model: PreTrainedModel, before: Mapping[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[Mixer]:
    """Return the modules whose attributes changed with each of two passes, and give these their values before."""
    changed = [path for path, value in second.items() if value is not None and value is not first.get(path)]
    modules: dict[str, list[str]] = {}
    for path in sorted(changed):
        owner, _, attribute = path.rpartition(".")
        outer = next((name for name in modules if owner.startswith(f"{name}.")), owner)
        modules.setdefault(outer, []).append(path.removeprefix(f"{outer}."))
        setattr(model.get_submodule(owner), attribute, before.get(path))
    layer_of = {name: next((int(part) for part in name.split(".") if part.isdigit()), 0) for name in modules}
    return [Mixer(name, layer_of[name], "", attributes=tuple(paths)) for name, paths in modules.items()]


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
            found = find_mixers(model)
        except ValueError:  # it demands a cache of its own kind
            found = find_mixers(model, use_cache=False)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} keeps states in a cache of its own kind; over Transformers' it fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    known = {mixer.layer_idx for mixer in found}
    other = [i for i in _state_layers(model) if i not in known]
    if other or not found:
        what = f"the states of layers {other}" if other else "its states"
        raise UnsupportedModelError(f"{name} keeps {what} outside of the cache")
    if num_ranks(model) > 1:
        raise UnsupportedModelError(f"{name} keeps states in {found[0].name}, which tensor parallelism would divide")
    return found


class _Recorder(StockCache):
    """A stock cache that records which module reaches its states, and the argument by which it got the cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.found: dict[tuple[nn.Module, int], str] = {}
        self._running: list[tuple[nn.Module, str]] = []
        for name in _READS + _WRITES + _OWN:
            setattr(self, name, partial(self._record, getattr(super(), name), name in _WRITES))

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Note that a module starts, and which argument holds the cache."""
        names = parameters_of(module.forward)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._running.append((module, next((name for name, value in given.items() if value is self), "")))

    def end(self, module: nn.Module, *results: object) -> None:
        """Note that a module has ended."""
        self._running.pop()

    def _record(self, method: Callable[..., Any], writes: bool, *args: Any, **kwargs: Any) -> Any:
        layer_idx = kwargs.get("layer_idx", args[writes] if len(args) > writes else None)
        if layer_idx is not None:
            module, argument = self._running[-1]
            self.found.setdefault((module, layer_idx), argument)
        return method(*args, **kwargs)


# Calls


def packed_calls(cache: BlockCache) -> MixerCall:
    """Return the function that calls mixers over packed tokens `[1, T, ...]` of the pass that a cache has prepared.

    Rows with equally many new tokens are a batch, which continues from the states of its rows and updates them. Under
    the model's own attention, a call has the rows of a `DenseBatch` already.
    """

    def call(mixer: Mixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get(mixer.argument, cache) is not cache:
            return module._call_impl(*args, **kwargs)
        arena, results = cache.pool.states, []
        batch = None if cache.in_use else cache.dense.batch
        calls = cache.state_plan.calls if batch is None or batch.state_call is None else [batch.state_call]
        for one in calls:
            states = MixerStates()
            if one.sources is not None:
                states = MixerStates(**arena.read(mixer.name, one.sources, one.in_place))
            own_args = [_rows_of(value, one, cache, states) for value in args]
            own_kwargs = {name: _rows_of(value, one, cache, states) for name, value in kwargs.items()}
            with _held(module, mixer.attributes, states):
                result = module._call_impl(*own_args, **own_kwargs)
            results.append(_packed(result) if batch is None else result)
            for kind, held in {"conv": states.conv, "recurrent": states.recurrent}.items():
                for state_idx, new in held.items():
                    if one.targets is not None:
                        arena.write(mixer.name, kind, state_idx, new, one.targets)
        return results[0] if calls[0].tokens is None else _in_order(calls, results)

    return call


@contextmanager
def _held(module: nn.Module, attributes: Sequence[str], states: MixerStates) -> Iterator[None]:
    """Let attributes of a module hold states during one call, after which `states` has the new ones."""
    parts = [path.rpartition(".") for path in attributes]
    owners = [(module.get_submodule(owner), attribute) for owner, _, attribute in parts]
    before = [getattr(*owner) for owner in owners]
    try:
        for index, owner in enumerate(owners):
            setattr(*owner, states.recurrent.get(index))
        yield
        states.recurrent.update((index, getattr(*owner)) for index, owner in enumerate(owners))
    finally:
        for owner, value in zip(owners, before, strict=True):
            setattr(*owner, value)


def _rows_of(value: Any, call: StateCall, cache: BlockCache, states: MixerStates) -> Any:
    """Return an argument for the rows of a call: their tokens as `[rows, length, ...]`, and the states as the cache."""
    if value is cache:
        return states
    if isinstance(value, tuple | list):
        return type(value)(_rows_of(one, call, cache, states) for one in value)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, cache.state_plan.num_tokens):
        return value
    own = value[0] if call.tokens is None else value[0].index_select(0, call.tokens.to(value.device))
    return own.unflatten(0, (call.num_rows, -1))


def _packed(result: Any) -> Any:
    """Return a result `[rows, length, ...]` as `[1, tokens, ...]`; states among the results are of no use then."""
    if isinstance(result, tuple | list):
        return type(result)(map(_packed, result))
    return result.flatten(0, 1)[None] if isinstance(result, torch.Tensor) else result


def _in_order(calls: Sequence[StateCall], results: Sequence[Any]) -> Any:
    """Join the packed results of calls in the order of the pass's tokens."""
    if isinstance(results[0], tuple | list):
        return type(results[0])(_in_order(calls, parts) for parts in zip(*results, strict=True))
    if not isinstance(results[0], torch.Tensor):
        return results[0]
    if any(result.shape[1] != one.tokens.numel() for one, result in zip(calls, results, strict=True)):  # type: ignore[union-attr]
        return None  # states
    joined = results[0].new_empty(1, sum(result.shape[1] for result in results), *results[0].shape[2:])
    for one, result in zip(calls, results, strict=True):
        assert one.tokens is not None
        joined[0].index_copy_(0, one.tokens.to(result.device), result[0])
    return joined


_calls: ContextVar[MixerCall | None] = ContextVar("hf_parallel_mixer_calls", default=None)


class _MixerImpl(InstalledCall):
    """Call of a mixer, installed on the module. Copies and pickles of a module do not have it."""


@contextmanager
def mixers_wrapped(model: nn.Module, mixers: Sequence[Mixer], call: MixerCall) -> Iterator[None]:
    """Pass calls of the mixers in this context to `call`; other threads are not affected."""
    for mixer in mixers:
        module = model.get_submodule(mixer.name)
        if not isinstance(vars(module).get("_compiled_call_impl"), _MixerImpl):
            vars(module)["_compiled_call_impl"] = _MixerImpl(_dispatch, mixer, module)
    token = _calls.set(call)
    try:
        yield
    finally:
        _calls.reset(token)


def unwrap_mixers(model: nn.Module) -> None:
    """Remove what `mixers_wrapped` has installed."""
    for module in model.modules():
        if isinstance(vars(module).get("_compiled_call_impl"), _MixerImpl):
            del vars(module)["_compiled_call_impl"]


def _dispatch(mixer: Mixer, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = _calls.get()
    return module._call_impl(*args, **kwargs) if call is None else call(mixer, module, args, kwargs)
