"""Calls of mixers: modules that keep a state instead of keys, such as linear attention, SSMs, short convolutions.

A mixer asks the cache for its state by `get_conv_state`, `update_recurrent_state` and the like, and sees a batch of
rows. So the calls of a mixer are replaced by one for each batch of rows with equally many new tokens, and in each of
them `MixerStates` stands in for the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_parallel.cache import BlockCache
from hf_parallel.cache.state_plan import StateCall
from hf_parallel.models.intercept.modules import InstalledCall, has_call, install_call, remove_call


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
        self.conv = dict(conv or {})
        self.recurrent = dict(recurrent or {})
        self._in_place = in_place
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
        previous = self.conv.get(state_idx)
        if previous is None:
            size = conv_kernel_size or conv_states.shape[-1]
            full = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            size = conv_kernel_size or previous.shape[-1]
            full = torch.cat([previous, conv_states], dim=-1)
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


def keep_states(cache: BlockCache, mixers: Sequence[Mixer]) -> None:
    """Make a cache keep the states of a model's mixers."""
    states = cache.pool.states
    states.in_use = bool(mixers)
    states.stepwise = any(mixer.stepwise for mixer in mixers)


def takes_use_cache(mixers: Sequence[Mixer]) -> bool:
    """Return the argument `use_cache` with which a model takes our cache."""
    return all(mixer.use_cache for mixer in mixers)


def packed_calls(cache: BlockCache) -> MixerCall:
    """Return the function that calls mixers over packed tokens `[1, T, ...]` of the pass that a cache has prepared.

    Rows with equally many new tokens are a batch, which continues from the states of its rows and updates them. Under
    the model's own attention, a call has the rows of a `DenseBatch` already.
    """

    def call(mixer: Mixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get(mixer.argument, cache) is not cache:
            return module._call_impl(*args, **kwargs)
        batch = None if cache.in_use else cache.dense.batch
        if batch is not None and batch.state_call is not None:
            calls = [batch.state_call]
        else:
            calls = cache.state_plan.calls
        results = []
        for state_call in calls:
            result = _call_rows(cache, mixer, module, state_call, args, kwargs)
            results.append(_packed(result) if batch is None else result)
        return results[0] if calls[0].tokens is None else _in_order(calls, results)

    return call


def _call_rows(
    cache: BlockCache,
    mixer: Mixer,
    module: nn.Module,
    call: StateCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a mixer for one batch of rows: read their states from the cache, and write the new ones."""
    arena = cache.pool.states
    states = MixerStates()
    if call.sources is not None:
        previous = arena.read(mixer.name, call.sources, call.in_place)
        states = MixerStates(previous["conv"], previous["recurrent"])
    row_args = [_rows_of(value, call, cache, states) for value in args]
    row_kwargs = {name: _rows_of(value, call, cache, states) for name, value in kwargs.items()}
    with _states_in_attributes(module, mixer.attributes, states):
        result = module._call_impl(*row_args, **row_kwargs)
    if call.targets is not None:
        for state_idx, state in states.conv.items():
            arena.write(mixer.name, "conv", state_idx, state, call.targets)
        for state_idx, state in states.recurrent.items():
            arena.write(mixer.name, "recurrent", state_idx, state, call.targets)
    return result


@contextmanager
def _states_in_attributes(module: nn.Module, paths: Sequence[str], states: MixerStates) -> Iterator[None]:
    """Let attributes of a module hold states during one call, after which `states` has the new ones."""
    attributes: list[tuple[nn.Module, str]] = []
    for path in paths:
        submodule, _, attribute = path.rpartition(".")
        attributes.append((module.get_submodule(submodule), attribute))
    values_before = [getattr(owner, name) for owner, name in attributes]
    try:
        for state_idx, (owner, name) in enumerate(attributes):
            setattr(owner, name, states.recurrent.get(state_idx))
        yield
        for state_idx, (owner, name) in enumerate(attributes):
            states.recurrent[state_idx] = getattr(owner, name)
    finally:
        for (owner, name), value in zip(attributes, values_before, strict=True):
            setattr(owner, name, value)


def _rows_of(value: Any, call: StateCall, cache: BlockCache, states: MixerStates) -> Any:
    """Return an argument for the rows of a call: their tokens as `[rows, length, ...]`, and the states as the cache."""
    if value is cache:
        return states
    if isinstance(value, tuple | list):
        return type(value)(_rows_of(part, call, cache, states) for part in value)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, cache.state_plan.num_tokens):
        return value
    tokens = value[0]  # [T, ...]
    if call.tokens is not None:
        tokens = tokens.index_select(0, call.tokens.to(value.device))
    return tokens.unflatten(0, (call.num_rows, -1))


def _packed(result: Any) -> Any:
    """Return a result `[rows, length, ...]` as `[1, tokens, ...]`; states among the results are of no use then."""
    if isinstance(result, tuple | list):
        return type(result)(map(_packed, result))
    if isinstance(result, torch.Tensor):
        return result.flatten(0, 1)[None]
    return result


def _in_order(calls: Sequence[StateCall], results: Sequence[Any]) -> Any:
    """Join the packed results of calls in the order of the pass's tokens."""
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)(_in_order(calls, parts) for parts in zip(*results, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    positions = [call.tokens for call in calls if call.tokens is not None]  # several calls name their tokens
    lengths = [result.shape[1] for result in results]
    if lengths != [tokens.numel() for tokens in positions]:
        return None  # states
    joined = first.new_empty(1, sum(lengths), *first.shape[2:])
    for tokens, result in zip(positions, results, strict=True):
        joined[0].index_copy_(0, tokens.to(result.device), result[0])
    return joined


_calls: ContextVar[MixerCall | None] = ContextVar("hf_parallel_mixer_calls", default=None)
"""What calls of mixers run in this thread; None: the module's own code."""


class _MixerImpl(InstalledCall):
    """Call of a mixer, installed from the first pass until `disable`: a pass of another thread may be using it."""


@contextmanager
def mixers_wrapped(model: nn.Module, mixers: Sequence[Mixer], call: MixerCall) -> Iterator[None]:
    """Pass calls of the mixers in this context to `call`; other threads are not affected."""
    for mixer in mixers:
        module = model.get_submodule(mixer.name)
        if not has_call(module, _MixerImpl):
            install_call(module, _MixerImpl(_dispatch, mixer, module))
    token = _calls.set(call)
    try:
        yield
    finally:
        _calls.reset(token)


def unwrap_mixers(model: nn.Module) -> None:
    """Remove what `mixers_wrapped` has installed."""
    for module in model.modules():
        remove_call(module, _MixerImpl)


def _dispatch(mixer: Mixer, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = _calls.get()
    if call is None:
        return module._call_impl(*args, **kwargs)
    return call(mixer, module, args, kwargs)
