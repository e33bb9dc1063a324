"""Probes which features of block attention a model supports, and rejects unsupported models.

What layers read, and their rotary embeddings, are measured in forward passes over one token, not inferred from the
model's class. Finally the logits over blocks are compared with those over a plain sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_parallel.cache import LayerReads
from hf_parallel.cache.placement import execution_device
from hf_parallel.kernels import RotarySpec
from hf_parallel.models.cpu.packed import PackedLinear
from hf_parallel.models.images import probe_images, why_no_images
from hf_parallel.models.intercept.attention import AttentionRecorder, UnsupportedModelError, block_attention_enabled
from hf_parallel.models.intercept.mixers import Mixer, takes_use_cache
from hf_parallel.models.intercept.modules import tensor_attributes_kept
from hf_parallel.models.intercept.rotary import rotary_modules, rotating_to
from hf_parallel.models.latent import are_latents
from hf_parallel.models.probing.check import OwnAttentionError, check_dense_logits, check_logits, sees_later_tokens
from hf_parallel.models.probing.mixers import StockCache, keeps_states, supported_mixers
from hf_parallel.models.probing.rotary import (
    PROBE_POSITIONS,
    Queries,
    frequencies,
    is_scaled,
    match_rotary,
    max_length,
    max_positions,
    norms_differ,
    position_limit,
)
from hf_parallel.models.probing.signature import cache_argument, takes
from hf_parallel.models.ranks import num_local_layers


class _NotCausalError(OwnAttentionError):
    """Raised if a layer says that it is not causal. Its model may pass a causal mask."""


class _TableReads(TorchDispatchMode):
    """Records which row of which table an embedding reads in forward passes over one token."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, int]] = []  # number of rows of the table, index of the row

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is torch.ops.aten.embedding.default:
            table, index = args[:2]
            if type(index) is torch.Tensor and index.numel() == 1:
                self.read.append((table.shape[0], int(index)))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a model under block attention.

    `rotary` is the rotary embedding by layer index; a layer without one has None. If `rotary` itself is None, blocks
    can be seen only at the positions that they were written for.
    """

    keyword: bool  # whether a keyword argument of `model.forward` reaches the attention function
    rotary: dict[int, RotarySpec | None] | None
    why_no_rotation: str = ""
    has_window: bool = False  # whether a layer has a sliding window
    max_length: int | None = None  # length beyond which RoPE frequencies change, which makes stored keys invalid
    num_positions: int | None = None  # rows of a table of positions, if there is one
    has_latents: bool = False  # whether a layer caches latents, from which it expands keys and values
    mixers: tuple[Mixer, ...] = ()  # modules that keep a state instead of keys
    reads: dict[int, LayerReads] = field(default_factory=dict)
    """Layers that share the keys of an earlier one, or whose attention mask alone limits the keys, by index."""
    scaled: bool = False  # whether layers scale their queries by their position
    bidirectional_layers: tuple[int, ...] = ()  # in which tokens of an image attend to later ones, too
    why_no_images: str = ""  # empty where prompts may have images
    dense: bool = False  # whether the model's own attention runs, over dense copies of rows
    pads: bool = True  # whether dense rows of unequal lengths may share a call
    batch_invariant: bool = False  # whether only kernels run whose bits do not depend on the batch

    def check_length(self, model: PreTrainedModel, longest: int) -> None:
        """Raise an error if rows of `longest` tokens exceed the model's positions; the last token needs none.

        Raises `UnsupportedModelError` if RoPE frequencies would change, `ValueError` beyond a table of positions.
        """
        name = type(model).__name__
        if self.max_length is not None and longest > self.max_length:
            raise UnsupportedModelError(
                f"{name} changes its RoPE frequencies after {self.max_length} tokens, which would invalidate cached "
                f"keys; prompt and new tokens may have at most that many, got {longest}"
            )
        if self.num_positions is not None and longest > self.num_positions + 1:
            raise ValueError(
                f"{name} has a table of positions for {self.num_positions} tokens; prompt and new tokens, the last of "
                f"which needs none, may have at most {self.num_positions + 1}, got {longest}"
            )


def probe_capabilities(model: PreTrainedModel) -> Capabilities:
    """Probe a model in a few forward passes over single tokens, and some over at most ten tokens.

    Raises `UnsupportedModelError` with the reason if neither block attention nor the model's own can serve rows, or the
    model fails over plain text.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    try:
        with tensor_attributes_kept(model):
            return _probed(model)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over text with {type(error).__name__}: {error}"
        ) from error


def _probed(model: PreTrainedModel) -> Capabilities:
    """Probe a model under block attention, or its own."""
    try:
        return _block_capabilities(model)
    except OwnAttentionError as reason:
        why = str(reason)
        may_be_bidirectional = isinstance(reason, _NotCausalError)
    try:
        with torch.no_grad(), _eval_mode(model):
            if may_be_bidirectional and sees_later_tokens(model):
                raise UnsupportedModelError("is bidirectional: its tokens attend to later ones")
            mixers = supported_mixers(model)
            # Probes are too short to show how padding changes states and sparse attention.
            may_pad = not mixers and not _own_cache_layers(model.config)
            pads = check_dense_logits(model, mixers, may_pad)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{why}; {error}") from error
    has_table = not frequencies(model) and not mixers  # of positions: learned or sinusoidal
    return Capabilities(
        keyword=False,
        rotary=None,
        why_no_rotation=why,
        max_length=max_length(model),
        num_positions=max_positions(model.config) if has_table else None,
        mixers=mixers,
        why_no_images=why_no_images(model) or f"{type(model).__name__} attends to dense rows, which cannot hold images",
        dense=True,
        pads=pads,
    )


def _block_capabilities(model: PreTrainedModel) -> Capabilities:
    """Probe a model under block attention."""
    _check_config(model)
    with torch.no_grad(), _eval_mode(model):
        mixers = supported_mixers(model)
        cache = StockCache(model)
        with_attention = [index for index, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]
        recorder = AttentionRecorder(with_attention)
        queries: dict[int, Queries] = {}
        tables: dict[int, list[tuple[int, int]]] = {}
        has_tables = sum(isinstance(module, nn.Embedding) for module in model.modules()) > 1  # beside the tokens'
        far = [position_limit(model) - 1] if frequencies(model) else []
        caches = {0: cache}
        if far:
            caches[PROBE_POSITIONS[0]] = _LongCache(model, far[0])
        with block_attention_enabled(model, recorder):
            # The far position comes first: if it changes the RoPE frequencies (dynamic), the near ones restore them.
            for position in (*far, 0, *PROBE_POSITIONS):
                table_reads = _TableReads()
                with table_reads if has_tables else nullcontext(), _failing_as_unsupported(model):
                    queries[position] = _queries_at(model, recorder, position, caches.get(position), mixers)
                tables[position] = table_reads.read
            reads = _checked_reads(model, recorder, queries[0], mixers)
            scaled = bool(far) and norms_differ(queries)
            if scaled:
                counted = _queries_at(model, recorder, 0, _LongCache(model, far[0]))
                for layer, query in counted.items():
                    if is_scaled({layer: query}, queries[0]):
                        read = reads.get(layer, LayerReads(recorder.sources[layer]))
                        reads[layer] = replace(read, counts=True)
                rotated = {}
                for position in queries:
                    queries[position] = _queries_at(model, recorder, position, None)
                    position_ids = torch.tensor([[position]], device=execution_device(model))
                    with rotating_to(rotary_modules(model), position_ids):
                        rotated[position] = _queries_at(model, recorder, 0, None)
                scaled = any(is_scaled(of_layers, rotated[position]) for position, of_layers in queries.items())
                if scaled:
                    queries = rotated
        leads = _rotated_parts(recorder, cache)
        rotary, why = match_rotary(model, queries.pop(0), queries, leads, reads)
        if mixers:
            rotary = None
            why = f"{type(model).__name__} keeps a state in {mixers[0].name}, which belongs to one order of tokens"
        try:
            check_logits(model, recorder.keyword_arrives, mixers, reads)
        except UnsupportedModelError:
            mixers = tuple(replace(mixer, stepwise=True) for mixer in mixers)
            if not mixers:
                raise
            check_logits(model, recorder.keyword_arrives, mixers, reads)
        bidirectional_layers, no_images = probe_images(model)
    return Capabilities(
        keyword=recorder.keyword_arrives,
        rotary=rotary,
        why_no_rotation=why,
        has_window=any(windows != (None, None, None) for windows in recorder.windows.values()),
        max_length=max_length(model),
        num_positions=_num_positions(tables),
        has_latents=bool(leads),
        mixers=mixers,
        reads=reads,
        scaled=scaled,
        bidirectional_layers=bidirectional_layers,
        why_no_images=no_images,
    )


class _LongCache(StockCache):
    """An empty cache that claims to hold `length` tokens."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        super().__init__(model)
        self._length = length

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return the length that is claimed."""
        return self._length


@contextmanager
def _failing_as_unsupported(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise OwnAttentionError(
            f"{type(model).__name__} fails under another attention function with {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    rounding = [module for module in model.modules() if isinstance(module, PackedLinear) and module.int8]
    try:
        model.eval()
        for layer in rounding:  # it turns the last bits in which a probe's passes differ into larger differences
            layer.int8 = False
        yield
    finally:
        for module, training in modes:
            module.training = training
        for layer in rounding:
            layer.int8 = True


def _check_config(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if the class or config of a model shows that it is unsupported."""
    text = model.config.get_text_config(decoder=True)
    ranks = getattr(model, "tp_size", None) or 1
    kv_heads = _kv_heads(text) if ranks > 1 else 0
    other_layers = set() if model.config.is_encoder_decoder else _own_cache_layers(model.config)
    reasons = {
        "is an encoder-decoder; block attention supports decoder-only models": model.config.is_encoder_decoder,
        "cannot generate: it has no language modeling head": not model.can_generate(),
        f"has {kv_heads} key-value heads, which tp_size={ranks} does not divide: each rank needs whole heads": (
            kv_heads % ranks
        ),
    }
    _raise_if(model, reasons)
    needed = {
        "caches more than keys and values: its layers choose or compress them "
        f"({', '.join(sorted(other_layers))})": other_layers,
        "uses ALiBi: distances are added to scores, not rotated into keys": getattr(text, "alibi", False),
        "does not use transformers' attention interface": not keeps_states(model) and not _uses_interface(model),
    }
    _raise_if(model, needed, OwnAttentionError)


def _uses_interface(model: PreTrainedModel) -> bool:
    """Whether a part of a model lets its attention implementation be set."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_attn_implementation():
            return True
    return False


def _own_cache_layers(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers in a model's stock cache that hold more than keys and values, or states."""
    kinds: set[str] = set()
    for layer in DynamicCache(config=config).layers:
        is_plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if isinstance(layer, DynamicLayer) and not is_plain and not isinstance(layer, LinearAttentionCacheLayerMixin):
            kinds.add(type(layer).__name__)
    return kinds


def _kv_heads(text: PreTrainedConfig) -> int:
    """Return the number of KV heads, or the greatest common divisor of those of the layers."""
    layers = getattr(text, "per_layer_config", None) or [text]
    heads = [
        getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", None) or 0
        for layer in layers
    ]
    return math.gcd(*heads)


def _checked_reads(
    model: PreTrainedModel, recorder: AttentionRecorder, queries: Queries, mixers: Sequence[Mixer]
) -> dict[int, LayerReads]:
    """Return what layers read beyond the arguments of attention.

    Raises `UnsupportedModelError` if the recorded calls show that the model is unsupported.
    """
    limit = position_limit(model)
    cache = DynamicCache(config=model.config)
    num_called = len(queries)
    if mixers:
        num_layers = sum(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    else:
        num_layers = num_local_layers(model)
    different: dict[str, int] = {}  # windows that the attention mask does not have, by the places that have them
    reads: dict[int, LayerReads] = {}
    for layer, (argument, mask, chunk) in recorder.windows.items():
        source = recorder.sources[layer]
        windows = {
            "the arguments of attention": argument,
            "the attention mask": mask or chunk,
            "the stock cache": getattr(cache.layers[source], "sliding_window", None),
        }
        cutting = {where: window for where, window in windows.items() if window is not None and window < limit}
        if len(set(cutting.values())) > 1 or (cutting and "the attention mask" not in cutting):
            different[" and ".join(cutting)] = min(cutting.values())
        if source != layer or (cutting and argument is None):
            reads[layer] = LayerReads(source, mask if cutting else None, chunk if cutting else None)
    where, window = next(iter(different.items()), ("", None))
    unknown = ", ".join(sorted(recorder.unknown))
    _raise_if(model, {f"has its sliding window of {window} only in {where}": window is not None})
    reasons = {
        f"changes its attention by {unknown}, which block attention would ignore": unknown,
        "calls transformers' attention interface more than once per layer": recorder.repeated,
        f"calls transformers' attention interface in {num_called} of its {num_layers} layers, not in all": (
            num_called != num_layers
        ),
        "builds an attention mask of its own, which block attention would ignore": recorder.masked,
    }
    _raise_if(model, reasons, OwnAttentionError)
    _raise_if(model, {"says that its attention is not causal": recorder.bidirectional}, _NotCausalError)
    return reads


def _raise_if(
    model: PreTrainedModel, reasons: Mapping[str, object], error: type[UnsupportedModelError] = UnsupportedModelError
) -> None:
    for reason, holds in reasons.items():
        if holds:
            raise error(f"{type(model).__name__} {reason}")


def _num_positions(reads: dict[int, list[tuple[int, int]]]) -> int | None:
    """Return for how many positions there are learned embeddings: rows of a table that are read by position."""
    numbers: list[int] = []
    later_reads = [reads[position] for position in PROBE_POSITIONS]
    for (rows, index), *later in zip(reads[0], *later_reads, strict=False):
        by_position = [(rows, index + position) for position in PROBE_POSITIONS]
        if later == by_position:
            numbers.append(rows - index)
    return min(numbers, default=None)


def _queries_at(
    model: PreTrainedModel,
    recorder: AttentionRecorder,
    position: int,
    cache: DynamicCache | None,
    mixers: Sequence[Mixer] = (),
) -> Queries:
    """Return the queries of one token at a position."""
    token = model.config.get_text_config(decoder=True).vocab_size // 2
    device = execution_device(model)
    arguments: dict[str, Any] = {
        "position_ids": torch.full((1, 1), position, device=device),
        "block_cache": recorder,
        cache_argument(model): cache,
    }
    accepted = {name: value for name, value in arguments.items() if takes(model.forward, name)}
    input_ids = torch.full((1, 1), token, device=device)
    model(input_ids=input_ids, use_cache=cache is not None and takes_use_cache(mixers), **accepted)
    queries = recorder.queries
    recorder.queries = {}
    return queries


def _rotated_parts(recorder: AttentionRecorder, cache: DynamicCache) -> dict[int, int]:
    """Return how many dimensions of the keys are cached beside latents, by the index of layers that cache latents."""
    leads = {}
    for layer, sizes in recorder.sizes.items():
        keys = getattr(cache.layers[layer], "keys", None)
        values = getattr(cache.layers[layer], "values", None)
        if keys is None or values is None:
            continue
        cached_sizes = (keys.shape[1], keys.shape[-1], values.shape[-1])
        if are_latents(cached_sizes, sizes):
            leads[layer] = values.shape[-1]
    return leads
