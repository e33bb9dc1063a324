"""Block attention as an attention implementation of Transformers, registered under the name `hf_parallel`.

The cache of the running call reaches the attention function as the keyword argument `block_cache` of
`model.forward`. Models that drop unknown keyword arguments get it through a context variable. The same variable makes
the model's config name block attention in the thread of the call, and in no other. While a model is probed
(`capabilities.py`), an `AttentionRecorder` takes the cache's place.

A layer stores its new keys and values in `BlockCache.update`, before it attends. In a compiled layer, `_attend` does
both: there, `update` returns them only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, SupportsIndex

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from hf_parallel.cache import BlockCache, LayerReads
from hf_parallel.kernels import AttentionParams, AttentionPlan, RotarySpec
from hf_parallel.models.intercept.classes import namesake, plain_class
from hf_parallel.models.latent import latent_heads, rotated_first

IMPLEMENTATION = "hf_parallel"
"""Name under which block attention is registered with Transformers."""


class UnsupportedModelError(ValueError):
    """Raised for a model that is not supported, or a mode that is not supported on this model."""


class LayoutAttention(Protocol):
    """What `block_attention_forward` reads from where there is no cache: the layout of a batch in training."""

    rotary: Mapping[int, RotarySpec | None] | None
    reads: Mapping[int, LayerReads]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of one layer, `[B, T, heads, head_dim]`, for a query `[B, heads, T, head_dim]`."""


@dataclass(eq=False)
class AttentionRecorder:
    """Records the arguments of the attention function during a forward pass over one token."""

    layers: Sequence[int] = ()  # with attention, for modules that several layers share
    keyword_arrives: bool = False  # whether `block_cache` reached the attention function
    masked: bool = False  # whether the model passed an attention mask of its own
    bidirectional: bool = False  # whether a layer is not causal
    repeated: bool = False  # whether a layer attends more than once in a pass
    unknown: set[str] = field(default_factory=set)  # names of tensors that block attention does not know
    later: int = 1  # index of a token of a pass
    ahead: set[int] = field(default_factory=set)  # layers whose mask lets the first token see that one
    windows: dict[int, tuple[int | None, int | None, int | None]] = field(default_factory=dict)
    """Sliding window by layer index, in the arguments and in the attention mask; and chunk in the mask."""
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer index
    sources: dict[int, int] = field(default_factory=dict)  # first layer with the same keys, by layer index
    queries: dict[int, torch.Tensor] = field(default_factory=dict)  # rotated, [heads, head_dim], by layer index
    sizes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """KV heads, and sizes of keys and values, by layer index."""

    def record(
        self,
        module: nn.Module,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None,
    ) -> None:
        """Record one call of the attention function; `layer`: -1 if several layers share the module."""
        self.bidirectional |= not getattr(module, "is_causal", True)
        from_mask = attention_mask is not None and attention_mask.dtype == torch.int64  # from `_mask`: the window
        self.masked |= attention_mask is not None and not from_mask
        if layer < 0 and len(self.queries) < len(self.layers):
            layer = self.layers[len(self.queries)]
        size = int(attention_mask) if from_mask else 0  # type: ignore[arg-type]
        window = size if size > 0 else None
        chunk = -size if size < 0 else None
        self.windows[layer] = (sliding_window, window, chunk)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            self.ahead.add(layer)
        self.repeated |= layer in self.queries
        self.sources[layer] = next((source for source, keys in self.keys.items() if keys is key), layer)
        self.keys[layer] = key
        self.queries[layer] = query[0, :, 0].detach()
        self.sizes[layer] = (key.shape[1], key.shape[-1], value.shape[-1])


@dataclass(eq=False)
class _ActiveAttention:
    """Block attention over one cache, of the model with these configs."""

    cache: BlockCache | AttentionRecorder | LayoutAttention
    configs: dict[int, PreTrainedConfig]  # by id


_active_attention: ContextVar[_ActiveAttention | None] = ContextVar("hf_parallel_active_attention", default=None)
"""Block attention that is enabled in the running thread."""
_all_active: weakref.WeakSet[_ActiveAttention] = weakref.WeakSet()
_lock = threading.Lock()


def block_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    block_cache: BlockCache | AttentionRecorder | LayoutAttention | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention function of the implementation, called by each layer.

    `query` is `[1, heads, T, head_dim]`, packed. `key` and `value`, `[1, kv_heads, T, head_dim]`, are already in the
    cache, except in a compiled layer, which stores them here. Returns `[1, T, heads, head_dim]`.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    index: int | None = getattr(module, "layer_idx", None)
    layer_idx = -1 if index is None else index  # -1: several layers share the module
    if torch.compiler.is_compiling() and not dropout:
        query = query.to(key.dtype)  # under autocast: the result has the dtype that the compiler expects
        return _attend(query, key, value, layer_idx, scale, sliding_window, softcap, s_aux), None
    active = _active_attention.get()
    cache = block_cache
    if cache is None and active is not None:
        cache = active.cache
    if isinstance(cache, AttentionRecorder):
        cache.keyword_arrives |= block_cache is not None
        tensors = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        cache.unknown |= tensors - {"position_ids"}
        cache.record(module, layer_idx, query, key, value, attention_mask, sliding_window)
        values = value[:, :, -query.shape[2] :]  # of the tokens; a model may have added some before them
        values = values.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return values.transpose(1, 2).contiguous(), None
    if cache is None:
        raise RuntimeError(
            f"attention implementation {IMPLEMENTATION!r} cannot be chosen: parallel generation modes set it themselves"
        )
    if dropout:
        raise UnsupportedModelError(f"attention dropout must be 0 while generating in parallel, got {dropout}")
    if isinstance(cache, BlockCache) and layer_idx < 0:  # several layers share the module
        layer_idx = cache.updated_layer
    reads = cache.reads.get(layer_idx)
    params = _params(cache, layer_idx, reads, key, scale, sliding_window, softcap, s_aux)
    if not isinstance(cache, BlockCache):
        if params.rotary is not None and params.rotary.of_values:
            query = rotated_first(query, params.rotary.rotary_dim)
            key = rotated_first(key, params.rotary.rotary_dim)
        return cache.attend(query, key, value, params).contiguous(), None
    params.batch_invariant = cache.batch_invariant
    plan = cache.plan_of(layer_idx)
    layer_idx = layer_idx if reads is None else reads.source
    layer = cache.pool.arena.layers[layer_idx]
    if (key.shape[-1], value.shape[-1]) != (layer.keys.shape[-1], layer.values.shape[-1]):  # made from what is stored
        try:
            params.latent = latent_heads(module, key, value, layer, expands=not cache.batch_invariant)
        except LookupError as error:
            raise UnsupportedModelError(f"{error.args[0]} (layer {layer_idx})") from None
        if params.latent is not None:
            query = rotated_first(query, layer.values.shape[-1])
            params.num_kv_heads = 1
    return attend_blocks(cache, query, layer_idx, params, plan), None


def attend_blocks(
    cache: BlockCache, query: torch.Tensor, layer_idx: int, params: AttentionParams, plan: AttentionPlan
) -> torch.Tensor:
    """Attend to the blocks of the prepared pass: `[1, heads, T, head_dim]` to `[1, T, heads, head_dim]`."""
    layer = cache.pool.arena.layers[layer_idx]
    if params.num_kv_heads != layer.num_kv_heads:
        raise UnsupportedModelError(
            f"attends to {params.num_kv_heads} key-value heads but caches {layer.num_kv_heads} (layer {layer_idx})"
        )
    mixed = torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if mixed else nullcontext():
        packed = query[0].transpose(0, 1).to(layer.keys.dtype)
        stored = layer.keys, layer.values
        return layer.backend.attend(packed, *stored, plan, params, layer.quantized).unsqueeze(0)


@torch.library.custom_op(
    "hf_parallel::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, SymInt layer_idx, float scale, SymInt? window, float? softcap, "
    "Tensor? sinks) -> Tensor",
)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """A layer's `BlockCache.update` and its attention, as one operation of a compiled layer (`compiled.py`)."""
    active = _active_attention.get()
    assert active is not None, "compiled layers run within block_attention_enabled"
    cache = active.cache
    if not isinstance(cache, BlockCache):
        raise UnsupportedModelError("layers that were compiled in place cannot be trained over blocks: load them again")
    reads = cache.reads.get(layer_idx)
    source = layer_idx if reads is None else reads.source
    if source == layer_idx:
        cache.update(key, value, layer_idx)
    params = _params(cache, layer_idx, reads, key, scale, window, softcap, sinks)
    return attend_blocks(cache, query, source, params, cache.plan)  # of a decode step, the same for all layers


def _params(
    cache: BlockCache | LayoutAttention,
    layer_idx: int,
    reads: LayerReads | None,
    key: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> AttentionParams:
    rotary = None if cache.rotary is None else cache.rotary.get(layer_idx)
    chunk = None
    if reads is not None:
        window = reads.window or window
        chunk = reads.chunk
    return AttentionParams(key.shape[1], scale, rotary, softcap, sinks, window, chunk)


@_attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_idx: int, scale: float, *more: object
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _mask(
    *args: object,
    local_size: int | None = None,
    kv_length: int = 1,
    mask_function: Callable[..., Any] | None = None,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> torch.Tensor | None:
    """Mask function of the implementation: no mask, as the plan holds the key ranges.

    While probing, it is the window, or less than zero for chunks: the first token of a chunk does not see the last one
    of the chunk before. It is true if the first of several tokens sees a later one (`AttentionRecorder.later`).
    """
    active = _active_attention.get()
    if active is None or not isinstance(active.cache, AttentionRecorder):
        return None
    later = active.cache.later
    index = torch.arange(max(local_size or 1, later) + 1, device=device)
    zero = index[0]
    if kv_length > later and mask_function is not None and mask_function(zero, zero, zero, index[later]):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if not local_size:
        return None
    try:
        sees = mask_function is None or bool(mask_function(zero, zero, index[local_size], index[local_size - 1]))
    except IndexError:  # it also looks up what the tokens of the pass are, such as images
        sees = True
    return torch.full((1, 1, 1, 1), local_size if sees else -local_size)


AttentionInterface.register(IMPLEMENTATION, block_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


@contextmanager
def block_attention_enabled(
    model: PreTrainedModel, cache: BlockCache | AttentionRecorder | LayoutAttention
) -> Iterator[None]:
    """Run a model with block attention over `cache` in this context; other threads use the model's own attention."""
    active = _ActiveAttention(cache, _configs(model.config))
    try:
        with _lock:
            _all_active.add(active)
            for config in active.configs.values():
                config.__class__ = _context_dependent(config.__class__)  # type: ignore[arg-type] # classes are hashable
        token = _active_attention.set(active)
        try:
            if isinstance(cache, BlockCache):
                cache.in_use = True
            yield
        finally:
            if isinstance(cache, BlockCache):
                cache.in_use = False
            _active_attention.reset(token)
    finally:
        with _lock:
            _all_active.discard(active)
            in_use = set[int]().union(*(other.configs for other in _all_active))  # by passes of other threads
            for key, config in active.configs.items():
                if key not in in_use:
                    config.__class__ = plain_class(type(config))


@lru_cache
def _context_dependent(plain: type[PreTrainedConfig]) -> Any:
    """Return a config class with block attention as its implementation where `_active_attention` says so.

    Whenever the class of a config is exchanged, other threads read the implementation of the plain class.
    """
    if plain_class(plain) is not plain:  # a pass of another thread uses the config
        return plain
    of_plain: Any = plain._attn_implementation

    def implementation(config: PreTrainedConfig) -> str | None:
        if torch.compiler.is_compiling():  # Dynamo cannot trace context variables
            is_chosen = _is_active()
        else:
            active = _active_attention.get()
            is_chosen = active is not None and id(config) in active.configs
        return IMPLEMENTATION if is_chosen else of_plain.fget(config)  # type: ignore[no-any-return]

    return namesake(
        plain,
        _attn_implementation=property(implementation, of_plain.fset),
        __reduce_ex__=_reduce_as_plain,
        __init__=plain.__init__,
        __eq__=plain.__eq__,
        __hash__=plain.__hash__,
    )


@torch.compiler.assume_constant_result
def _is_active() -> bool:
    """Whether this thread runs a pass with block attention."""
    return _active_attention.get() is not None


def _reduce_as_plain(config: PreTrainedConfig, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Copy and pickle a config as one of the plain class."""
    plain = plain_class(type(config))
    state = plain.__reduce_ex__(config, protocol)[2:]
    return (object.__new__, (plain,), *state)


def _configs(config: PreTrainedConfig) -> dict[int, PreTrainedConfig]:
    """Return the configs of a language model, by id; an image encoder keeps its own attention."""
    text = config.get_text_config(decoder=True)
    configs = {id(config): config, id(text): text}
    for name in text.sub_configs:
        inner = getattr(text, name, None)
        if inner is not None:
            configs |= _configs(inner)
    return configs
