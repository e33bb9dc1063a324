"""How block attention meets Transformers: the registered implementation, and what a loaded model can do with it.

The implementation is registered once under the name `hf_parallel`. The cache of the running call reaches it as the
keyword argument `block_cache` of `model.forward`; models that drop unknown keywords on the way get it through a
context variable. What a model's layers do to positions is not guessed from its class but read off a forward pass
over one token: a single token attends to itself alone, so its queries differ between positions by their rotation.
Whether all of a model is understood is seen from its logits, over blocks and over a plain row.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import RotarySpec, block_attention, rotate

IMPLEMENTATION = "hf_parallel"
"""Name under which block attention is registered with Transformers."""

PROBE_POSITIONS = (1, 7)
"""Positions at which the queries of one token are compared with those at position 0."""

PROBE_TOLERANCE = (1e-4, 3e-2)
"""Relative error allowed to a turned query, in float32 and in half precision."""

CHECK_SHARED, CHECK_TAILS = 5, (2, 3)
"""Tokens that the rows of the check at `enable` share, and those of their own."""

CHECK_TOLERANCE = (1e-2, 0.7)
"""Relative error allowed to logits. Unrelated ones have 1.4; half precision may choose other experts."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_OTHER_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "moe", "chunked_attention")


class UnsupportedModelError(ValueError):
    """A model, or a mode on this model, that block attention cannot serve; the message says why."""


@dataclass(eq=False)
class _Recorder:
    """Stands in for the cache while a model is probed."""

    keyword_arrives: bool = False
    masked: bool = False
    bidirectional: bool = False
    hidden_windows: set[int] = field(default_factory=set)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)


_switching = threading.Lock()
"""Held while a model's attention is exchanged, so that nobody reads it in between."""
_current: ContextVar[BlockCache | _Recorder | None] = ContextVar("hf_parallel_cache", default=None)


def _block_attention_forward(
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
    block_cache: BlockCache | _Recorder | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of the implementation `hf_parallel`, called by each layer of the model.

    `query` is `[1, heads, T, head_dim]`, packed; `key` and `value`, `[1, kv_heads, T, head_dim]`, are in the cache
    already. Returns `[1, T, heads, head_dim]`.
    """
    cache = block_cache if block_cache is not None else _current.get()
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(cache, _Recorder):
        cache.keyword_arrives |= block_cache is not None
        cache.bidirectional |= not getattr(module, "is_causal", True)
        if attention_mask is not None and attention_mask.dtype == torch.int64:  # what `_no_mask` gave
            cache.hidden_windows |= {int(attention_mask)} - {sliding_window}
        else:
            cache.masked |= attention_mask is not None
        cache.queries[layer_idx] = query[0, :, 0].detach()
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None
    if cache is None:
        raise RuntimeError(
            f"attention implementation {IMPLEMENTATION!r} runs only inside a parallel generation mode; "
            "another thread may be using this model"
        )
    if dropout:
        raise UnsupportedModelError(f"attention dropout must be 0 while generating in parallel, got {dropout}")
    layer = cache.storage(layer_idx)
    mixed = torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if mixed else nullcontext():
        out = block_attention(
            query[0].transpose(0, 1).to(layer.keys.dtype),
            layer.keys,
            layer.values,
            cache.plan,
            num_kv_heads=layer.num_kv_heads,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            rotary=None if cache.rotary is None else cache.rotary.get(layer_idx),
            softcap=softcap,
            sinks=s_aux,
            window=sliding_window,
        )
    return out.unsqueeze(0), None


def _no_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Mask function of the implementation: none, as who sees what is in the plan. To a probe it tells the window."""
    if isinstance(_current.get(), _Recorder) and local_size:
        return torch.full((1, 1, 1, 1), local_size)
    return None


AttentionInterface.register(IMPLEMENTATION, _block_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


@contextmanager
def block_attention_enabled(model: PreTrainedModel, cache: BlockCache | _Recorder) -> Iterator[None]:
    """Run a model with block attention over `cache`; what was set before is restored, whatever happens inside.

    Raises
    ------
    RuntimeError
        If block attention is set already: for another thread, or by hand.
    """
    with _implementation_set(model):
        layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)] if model.training else []
        token = _current.set(cache)
        try:
            for layer in layers:  # checkpointing drops the cache; there is nothing to check-point without gradients
                layer.gradient_checkpointing = False  # type: ignore[assignment]
            if isinstance(cache, BlockCache):
                cache.block_attention = True
            yield
        finally:
            if isinstance(cache, BlockCache):
                cache.block_attention = False
            for layer in layers:
                layer.gradient_checkpointing = True  # type: ignore[assignment]
            _current.reset(token)


@contextmanager
def _implementation_set(model: PreTrainedModel) -> Iterator[None]:
    """Exchange a model's attention implementation, for everybody who uses it."""
    before: list[tuple[Any, str]] = []
    try:
        with _switching:
            found = [(config, config._attn_implementation) for config in _configs(model.config)]
            if any(implementation == IMPLEMENTATION for _, implementation in found):
                raise RuntimeError(
                    f"attention implementation {IMPLEMENTATION!r} is set already; is another thread using it?"
                )
            before = found
            model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        with _switching:
            for config, implementation in before:
                config._attn_implementation = implementation


def _configs(config: Any) -> list[Any]:
    """A config and those inside it, outer ones first."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(c for sub in inner if sub is not None for c in _configs(sub))]


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run a model without dropout; every module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class Capabilities:
    """What a model can do with block attention.

    Attributes
    ----------
    keyword : bool
        Whether a keyword argument of `model.forward` reaches the attention function.
    rotary : dict of int to RotarySpec or None, optional
        How each layer rotates. None: the model's blocks cannot be seen at other positions than their own.
    why_no_rotation : str
        The reason, where `rotary` is None.
    max_length : int, optional
        Length from which the model's RoPE frequencies change, so that keys held already would be wrong.
    """

    keyword: bool
    rotary: dict[int, RotarySpec | None] | None
    why_no_rotation: str = ""
    max_length: int | None = None


def capabilities(model: PreTrainedModel) -> Capabilities:
    """Find out what a model can do with block attention, by running it on one token, then on a few.

    Raises
    ------
    UnsupportedModelError
        If it can do nothing, with the reason.
    """
    refuse_by_config(model)
    with torch.no_grad(), _evaluating(model):
        recorder = _Recorder()
        queries: dict[int, dict[int, torch.Tensor]] = {}
        config = model.config.get_text_config(decoder=True)
        far = [_positions(config) - 1] if _frequencies(model) else []
        with block_attention_enabled(model, recorder):
            for position in (*far, 0, *PROBE_POSITIONS):  # ending at a near one: some frequencies follow the position
                _run_one_token(model, recorder, position)
                queries[position], recorder.queries = recorder.queries, {}
        _refuse_by_record(model, recorder, queries[0])
        rotary, why = _read_rotary(model, queries.pop(0), queries)
        _check_logits(model, recorder.keyword_arrives)
    return Capabilities(recorder.keyword_arrives, rotary, why, _max_length(config))


def refuse_by_config(model: Any) -> None:
    """Refuse what a model's class and config show to be impossible.

    Raises
    ------
    TypeError
        If `model` is not a `PreTrainedModel`.
    UnsupportedModelError
        With the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; block attention serves decoder-only models")
    if not model.can_generate():
        raise UnsupportedModelError(f"{name} cannot generate: it has no language modelling head")
    text = config.get_text_config(decoder=True)
    others = sorted({kind for kind in getattr(text, "layer_types", None) or () if kind in _OTHER_LAYERS})
    if others or getattr(model, "_is_stateful", False):
        kinds = ", ".join(others) or "recurrent state"
        raise UnsupportedModelError(f"{name} has layers without a key-value cache of all tokens ({kinds})")
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name} uses multi-head latent attention, whose cache holds no keys to rotate")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name} has {text.num_kv_shared_layers} layers that read keys of earlier ones")
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        raise UnsupportedModelError(f"{name} uses ALiBi: distances are added to scores, not rotated into keys")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not use transformers' attention interface")


def _refuse_by_record(model: PreTrainedModel, recorder: _Recorder, queries: dict[int, torch.Tensor]) -> None:
    """Refuse what one token has shown to be impossible."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if len(queries) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{name} sends {len(queries)} of its {config.num_hidden_layers} layers through transformers' attention "
            "interface, not all"
        )
    if recorder.bidirectional:
        raise UnsupportedModelError(f"{name} is bidirectional: its tokens attend to later ones")
    hidden = [window for window in recorder.hidden_windows if window < _positions(config)]
    if hidden:
        raise UnsupportedModelError(f"{name} has its sliding window of {min(hidden)} in the attention mask alone")
    if recorder.masked:
        raise UnsupportedModelError(f"{name} makes an attention mask of its own, which block attention would ignore")


def _check_logits(model: PreTrainedModel, keyword: bool) -> None:
    """Refuse a model whose logits over blocks are not those over a plain row: it does what nothing else has shown."""
    name, device = type(model).__name__, model.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = (vocabulary // 2 + torch.arange(CHECK_SHARED + sum(CHECK_TAILS), device=device)) % vocabulary
    shared, *tails = tokens.split((CHECK_SHARED, *CHECK_TAILS))
    row = torch.cat((shared, tails[-1]))
    expected = model(input_ids=row[None], use_cache=False).logits[0, CHECK_SHARED:].double()
    cache = BlockCache(device=device)
    root, *own = cache.new_block(CHECK_SHARED), *cache.new_blocks(len(tails), max(CHECK_TAILS), base=CHECK_SHARED)
    segments = [Segment([root], CHECK_SHARED), *(Segment([root, b], len(t)) for b, t in zip(own, tails, strict=True))]
    with block_attention_enabled(model, cache):
        forward = cache.prepare(segments)
        try:
            logits = model(
                input_ids=tokens[None],
                position_ids=forward.position_ids[None],
                past_key_values=cache,
                use_cache=True,
                **({"block_cache": cache} if keyword else {}),
            ).logits[0, -len(tails[-1]) :]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise UnsupportedModelError(
                f"{name} needs a cache of its own kind; over blocks it fails with {type(error).__name__}: {error}"
            ) from error
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    stored = cache.storage(0).keys  # under autocast less precise than the logits
    if (logits.double() - expected).norm() > _tolerance(stored, CHECK_TOLERANCE) * spread:
        raise UnsupportedModelError(
            f"{name} gives other logits over blocks than over a plain row: it mixes tokens in a way of its own"
        )


def _run_one_token(model: PreTrainedModel, recorder: _Recorder, position: int) -> None:
    device = model.device
    token = model.config.get_text_config(decoder=True).vocab_size // 2
    arguments: dict[str, Any] = {
        "input_ids": torch.full((1, 1), token, device=device),
        "position_ids": torch.full((1, 1), position, device=device),
        "use_cache": False,
    }
    if accepts_keywords(model):
        arguments["block_cache"] = recorder
    model(**arguments)


def accepts_keywords(model: PreTrainedModel) -> bool:
    """Whether `model.forward` takes keyword arguments that it does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def _read_rotary(
    model: PreTrainedModel, at_zero: dict[int, torch.Tensor], queries: dict[int, dict[int, torch.Tensor]]
) -> tuple[dict[int, RotarySpec | None] | None, str]:
    """Find the rotary embedding of each layer among those that the model holds, by what it does to a query."""
    name = type(model).__name__
    kinds = _rope_types(model.config.get_text_config(decoder=True))
    changing = sorted(kinds & set(_LENGTH_DEPENDENT_ROPE))
    if changing:
        return None, f"{name} uses {changing[0]} RoPE scaling, whose frequencies change with the length"
    candidates = [RotarySpec(inv_freq, style) for inv_freq in _frequencies(model) for style in (False, True)]
    found: dict[int, RotarySpec | None] = {}
    for layer, base in at_zero.items():
        turned = {position: at[layer] for position, at in queries.items()}
        near = {position: turned[position] for position in PROBE_POSITIONS}
        fits = [spec for spec in (None, *candidates) if _explains(spec, base, near)]
        if not fits:
            if candidates:
                return None, f"{name} changes its queries behind their rotary embedding (layer {layer})"
            return None, f"{name} has positions that are no rotary embeddings"
        if any(_apart(query.norm(dim=-1), base.norm(dim=-1)) for query in turned.values()):
            return None, f"{name} scales its queries by their position (layer {layer})"
        found[layer] = fits[0]
    if all(spec is None for spec in found.values()):
        return None, f"{name}'s queries carry no position that could be turned"
    return found, ""


def _frequencies(model: PreTrainedModel) -> list[tuple[float, ...]]:
    """The distinct `inv_freq` buffers of a model, after scaling."""
    names = [(n, b) for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n]
    return list(dict.fromkeys(tuple(buffer.double().flatten().tolist()) for _, buffer in names))


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return {str(p.get("rope_type", "default")) for p in nested}


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions that a model is made for (`max_position_embeddings`); None if it has no limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _positions(config: Any) -> int:
    """Positions that a model is made for; those of the probe where it does not say."""
    return getattr(config, "max_position_embeddings", None) or max(PROBE_POSITIONS) + 1


def _max_length(config: Any) -> int | None:
    """Length up to which a model's RoPE frequencies are those of a short row."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    limits = {
        "dynamic": [_positions(config)],
        "longrope": [p.get("original_max_position_embeddings", _positions(config)) for p in nested],
    }
    return min((length for kind in _rope_types(config) for length in limits.get(kind, [])), default=None)


def _explains(spec: RotarySpec | None, base: torch.Tensor, turned: dict[int, torch.Tensor]) -> bool:
    """Whether turning the query at position 0, `[heads, head_dim]`, by `spec` gives those at the other positions."""
    if spec is not None and spec.rotary_dim > base.shape[-1]:
        return False
    for position, query in turned.items():
        expected = base.double()
        if spec is not None:
            delta = torch.tensor([position]).numpy()
            expected = rotate(expected, *spec.tables(delta, torch.float64, base.device), spec)
        if _apart(query, expected.to(base.dtype)):
            return False
    return True


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype differ by more than its rounding."""
    return bool((a.double() - b.double()).abs().max() > _tolerance(a, PROBE_TOLERANCE) * b.double().abs().max())


def _tolerance(x: torch.Tensor, allowed: tuple[float, float]) -> float:
    return allowed[0] if x.dtype in (torch.float32, torch.float64) else allowed[1]
