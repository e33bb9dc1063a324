"""Compares the logits that a model computes over blocks with those over a plain sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_parallel.cache import Block, BlockCache, LayerReads, Segment
from hf_parallel.cache.placement import execution_device
from hf_parallel.models.decode.dense import dense_logits
from hf_parallel.models.intercept.attention import UnsupportedModelError, block_attention_enabled
from hf_parallel.models.intercept.mixers import (
    Mixer,
    keep_states,
    mixers_wrapped,
    packed_calls,
    takes_use_cache,
)
from hf_parallel.models.probing.signature import cache_argument, parameters_of, takes

CHECK_SHARED = 5
CHECK_TAILS = (2, 3)
"""Numbers of shared tokens, and of each row's own, in the comparison of logits."""
LOGITS_TOLERANCE = (1e-3, 0.7)
"""Errors allowed in float32 and in half precision, in which a token may be routed to other experts, relative to what
other tokens before a row change in its logits. With small weights, that is little."""
REDUCED_TOLERANCE = 1e-2
"""The same in float32 where products are rounded further, as in TF32."""
ROUNDING = (1e-5, 1e-2)
"""Errors always allowed, relative to the logits themselves. Those of unrelated logits are 1.4."""


class OwnAttentionError(UnsupportedModelError):
    """Raised if block attention cannot replace a model's attention, which may run over dense copies of rows."""


class _StockRows(NamedTuple):
    """Rows after shared tokens, with the logits of a model over its stock cache."""

    shared: torch.Tensor  # int64 [CHECK_SHARED]
    tails: list[torch.Tensor]  # tokens of each row, int64, of the lengths CHECK_TAILS
    logits: torch.Tensor  # [sum(CHECK_TAILS), vocabulary]
    context: float  # difference that other shared tokens make to logits, relative to their spread


def check_logits(
    model: PreTrainedModel, keyword: bool, mixers: Sequence[Mixer], reads: Mapping[int, LayerReads]
) -> None:
    """Raise `UnsupportedModelError` if logits over blocks differ from those over a plain sequence."""
    name = type(model).__name__
    rows = _rows(model)
    if not rows.logits.isfinite().any():
        raise UnsupportedModelError(f"{name} returns logits that are not finite")
    tokens = torch.cat((rows.shared, *rows.tails))
    cache = BlockCache(device=tokens.device)
    cache.reads = reads
    keep_states(cache, mixers)
    counts = (CHECK_SHARED, *CHECK_TAILS)
    segments = [Segment(view, count) for view, count in zip(_views(cache), counts, strict=True)]
    with block_attention_enabled(model, cache), mixers_wrapped(model, mixers, packed_calls(cache)):
        forward = cache.prepare(segments)
        cache.positions = forward.position_ids
        arguments: dict[str, Any] = {cache_argument(model): cache}
        if takes(model.forward, "position_ids"):
            arguments["position_ids"] = forward.position_ids[None]
        if keyword:
            arguments["block_cache"] = cache
        try:
            output = model(input_ids=tokens[None], use_cache=takes_use_cache(mixers), **arguments)
            logits = output.logits[0, CHECK_SHARED:]
        except UnsupportedModelError as error:
            raise OwnAttentionError(f"{name} {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise OwnAttentionError(
                f"{name} needs a cache of its own kind; over blocks it fails with {type(error).__name__}: {error}"
            ) from error
    stored = next((layer.keys for layer in cache.pool.arena.layers.values()), logits)  # under autocast less precise
    if not _differ(logits, rows.logits, rows.context, (stored.dtype, model.dtype)):
        return
    difference = f"{name} computes other logits over blocks than over a plain sequence"
    dynamic = {type(module).__name__ for module in model.modules() if "quantized.dynamic" in type(module).__module__}
    if dynamic:
        raise UnsupportedModelError(
            f"{difference}: its dynamically quantized layers ({', '.join(sorted(dynamic))}) round all tokens of a "
            "pass with one scale; quantize weights only"
        )
    if "position_ids" in parameters_of(model.forward):
        raise OwnAttentionError(f"{difference}: it mixes tokens outside of attention")
    raise OwnAttentionError(f"{difference}: it takes no position_ids, and counts tokens of its cache instead")


def check_dense_logits(model: PreTrainedModel, mixers: Sequence[Mixer], may_pad: bool) -> bool:
    """Check the logits of a model's own attention over dense rows: a step of two rows after shared tokens.

    Return whether rows of unequal lengths may share a call. Raises `UnsupportedModelError` without the model's name.
    """
    if cache_argument(model) not in parameters_of(model.forward):
        raise UnsupportedModelError(f"its own takes no {cache_argument(model)}")
    rows = _rows(model)
    ends = [number - 1 for number in accumulate(CHECK_TAILS)]
    expected = rows.logits[ends]
    try:
        for padded in (True, False) if may_pad else (False,):
            logits = _dense_step(model, rows, mixers, padded)
            if not _differ(logits, expected, rows.context, (logits.dtype, model.dtype)):
                return padded
    except UnsupportedModelError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"its own attention fails with {type(error).__name__}: {error}") from error
    raise UnsupportedModelError("its own attention computes other logits over a cache than over a plain sequence")


def _dense_step(model: PreTrainedModel, rows: _StockRows, mixers: Sequence[Mixer], padded: bool) -> torch.Tensor:
    """Return the logits of the last token of each row, computed in a step after all tokens before."""
    cache = BlockCache(device=rows.shared.device)
    keep_states(cache, mixers)
    root, *views = _views(cache)
    segments = [Segment(root, CHECK_SHARED)]
    segments += [Segment(view, len(tail) - 1) for view, tail in zip(views, rows.tails, strict=True)]
    tokens = torch.cat((rows.shared, *(tail[:-1] for tail in rows.tails)))
    dense_logits(model, cache, cache.prepare(segments), tokens, None, padded, mixers)
    cache.commit()
    if not cache.pool.arena.layers:
        raise UnsupportedModelError("stores no keys in the cache that it is given")
    step = cache.prepare([Segment(view, 1) for view in views])
    last_tokens = torch.stack([tail[-1] for tail in rows.tails])
    return dense_logits(model, cache, step, last_tokens, None, padded, mixers)


def _views(cache: BlockCache) -> list[list[Block]]:
    """Return a view of shared tokens, and one of each row after them."""
    root = cache.pool.new_block(CHECK_SHARED)
    leaves = cache.pool.new_blocks(len(CHECK_TAILS), max(CHECK_TAILS), base=CHECK_SHARED)
    return [[root], *([root, leaf] for leaf in leaves)]


def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether the logits of a token depend on later tokens, by more than a tenth of what earlier ones change."""
    rows = _rows(model)
    tail = rows.tails[-1]
    tokens = torch.cat((rows.shared, tail[:-1], rows.shared[:1]))  # with another token at the end
    changed = _stock_logits(model, tokens)[CHECK_SHARED:-1]
    expected = rows.logits[-len(tail) : -1]
    return _relative(changed, expected) > 0.1 * rows.context


def _rows(model: PreTrainedModel) -> _StockRows:
    """Return different tokens for shared and own ones of rows, with their logits."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    numbers = torch.arange(CHECK_SHARED + sum(CHECK_TAILS), device=execution_device(model))
    tokens = (vocabulary // 2 + numbers) % vocabulary
    shared, *tails = tokens.split((CHECK_SHARED, *CHECK_TAILS))
    logits = []
    for tail in tails:
        of_row = _stock_logits(model, torch.cat((shared, tail)))
        logits.append(of_row[CHECK_SHARED:])
    others = (shared + vocabulary // 3) % vocabulary
    changed = _stock_logits(model, torch.cat((others, tails[-1])))[CHECK_SHARED:]
    return _StockRows(shared, tails, torch.cat(logits), _relative(changed, logits[-1]))


def _stock_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits `[tokens, vocabulary]` of a plain sequence."""
    inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens), device=tokens.device)[None]}
    accepted = parameters_of(model.forward)
    arguments = {name: value for name, value in inputs.items() if name in accepted}
    logits: torch.Tensor = model(**arguments, use_cache=False).logits[0]
    return logits


def _differ(logits: torch.Tensor, expected: torch.Tensor, context: float, dtypes: Sequence[torch.dtype | None]) -> bool:
    """Return whether logits differ by more than rounding to any of `dtypes` explains; `context`: see `_rows`."""
    if not torch.equal(logits.isfinite(), expected.isfinite()):  # a model may forbid tokens
        return True
    is_half = any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes)
    allowed = LOGITS_TOLERANCE[is_half]
    if not is_half and torch.get_float32_matmul_precision() != "highest":
        allowed = REDUCED_TOLERANCE
    return _relative(logits, expected) > max(allowed * min(context, 1.0), ROUNDING[is_half])


def _relative(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference of logits, relative to the spread of those expected."""
    logits = logits.double().nan_to_num(0.0, 0.0, 0.0)
    expected = expected.double().nan_to_num(0.0, 0.0, 0.0)
    over = -1 if expected.shape[-1] > 1 else 0  # a reward model has one output, which differs between tokens only
    spread = (expected - expected.mean(dim=over, keepdim=True)).norm()
    return float((logits - expected).norm() / spread)
