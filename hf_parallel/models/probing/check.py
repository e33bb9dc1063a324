"""Compares the logits that a model computes over blocks with those over a plain sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

CHECK_SHARED, CHECK_TAILS = 5, (2, 3)  # numbers of shared tokens and of each row's own in the comparison of logits
LOGITS_TOLERANCE = (1e-3, 0.7)
"""Errors allowed in float32 and in half precision, in which a token may be routed to other experts, relative to what
other tokens before a row change in its logits. With small weights, that is little."""
REDUCED_TOLERANCE = 1e-2
"""The same in float32 where products are rounded further, as in TF32."""
ROUNDING = (1e-5, 1e-2)
"""Errors always allowed, relative to the logits themselves. Those of unrelated logits are 1.4."""


class OwnAttentionError(UnsupportedModelError):
    """Raised if block attention cannot replace a model's attention, which may run over dense copies of rows."""


def check_logits(
    model: PreTrainedModel, keyword: bool, mixers: Sequence[Mixer], reads: Mapping[int, LayerReads]
) -> None:
    """Raise `UnsupportedModelError` if logits over blocks differ from those over a plain sequence."""
    shared, tails, expected, context = _rows(model)
    tokens = torch.cat((shared, *tails))
    if not expected.isfinite().any():
        raise UnsupportedModelError(f"{type(model).__name__} returns logits that are not finite")
    cache = BlockCache(device=tokens.device)
    cache.reads = reads
    keep_states(cache, mixers)
    counts = (CHECK_SHARED, *CHECK_TAILS)
    segments = [Segment(view, count) for view, count in zip(_views(cache), counts, strict=True)]
    with block_attention_enabled(model, cache), mixers_wrapped(model, mixers, packed_calls(cache)):
        forward = cache.prepare(segments)
        cache.positions = forward.position_ids
        more = {"position_ids": forward.position_ids[None]} if takes(model.forward, "position_ids") else {}
        try:
            logits = model(
                input_ids=tokens[None],
                use_cache=takes_use_cache(mixers),
                **{cache_argument(model): cache},
                **more,
                **({"block_cache": cache} if keyword else {}),
            ).logits[0, CHECK_SHARED:]
        except UnsupportedModelError as error:
            raise OwnAttentionError(f"{type(model).__name__} {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise OwnAttentionError(
                f"{type(model).__name__} needs a cache of its own kind; "
                f"over blocks it fails with {type(error).__name__}: {error}"
            ) from error
    stored = next((layer.keys for layer in cache.pool.arena.layers.values()), logits)  # under autocast less precise
    if not _differ(logits, expected, context, (stored.dtype, model.dtype)):
        return
    why = f"{type(model).__name__} computes other logits over blocks than over a plain sequence: "
    if dynamic := {type(m).__name__ for m in model.modules() if "quantized.dynamic" in type(m).__module__}:
        raise UnsupportedModelError(
            f"{why}its dynamically quantized layers ({', '.join(sorted(dynamic))}) round all tokens of a pass with one "
            "scale; quantize weights only"
        )
    counted = "it takes no position_ids, and counts tokens of its cache instead"
    takes_positions = "position_ids" in parameters_of(model.forward)
    raise OwnAttentionError(why + ("it mixes tokens outside of attention" if takes_positions else counted))


def check_dense_logits(model: PreTrainedModel, mixers: Sequence[Mixer], may_pad: bool) -> bool:
    """Check the logits of a model's own attention over dense rows: a step of two rows after shared tokens.

    Return whether rows of unequal lengths may share a call. Raises `UnsupportedModelError` without the model's name.
    """
    if cache_argument(model) not in parameters_of(model.forward):
        raise UnsupportedModelError(f"its own takes no {cache_argument(model)}")
    shared, tails, expected, context = _rows(model)
    ends = expected[[sum(CHECK_TAILS[: row + 1]) - 1 for row in range(len(tails))]]
    try:
        for padded in (True, False) if may_pad else (False,):
            cache = BlockCache(device=shared.device)
            keep_states(cache, mixers)
            root, *rows = _views(cache)
            begin = [
                Segment(root, CHECK_SHARED),
                *(Segment(row, len(t) - 1) for row, t in zip(rows, tails, strict=True)),
            ]
            tokens = torch.cat((shared, *(tail[:-1] for tail in tails)))
            dense_logits(model, cache, cache.prepare(begin), tokens, None, padded, mixers)
            cache.commit()
            if not cache.pool.arena.layers:
                raise UnsupportedModelError("stores no keys in the cache that it is given")
            step = cache.prepare([Segment(row, 1) for row in rows])
            logits = dense_logits(model, cache, step, torch.stack([tail[-1] for tail in tails]), None, padded, mixers)
            if not _differ(logits, ends, context, (logits.dtype, model.dtype)):
                return padded
    except UnsupportedModelError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"its own attention fails with {type(error).__name__}: {error}") from error
    raise UnsupportedModelError("its own attention computes other logits over a cache than over a plain sequence")


def _views(cache: BlockCache) -> list[list[Block]]:
    """Return a view of shared tokens, and one of each row after them."""
    root = cache.pool.new_block(CHECK_SHARED)
    own = cache.pool.new_blocks(len(CHECK_TAILS), max(CHECK_TAILS), base=CHECK_SHARED)
    return [[root], *([root, block] for block in own)]


def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether the logits of a token depend on later tokens, by more than a tenth of what earlier ones change."""
    shared, tails, expected, context = _rows(model)
    tail = tails[-1]
    others = torch.cat((tail[:-1], shared[:1]))
    changed = _stock_logits(model, torch.cat((shared, others)))[CHECK_SHARED:-1]
    return _relative(changed, expected[-len(tail) : -1]) > 0.1 * context


def _rows(model: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, float]:
    """Return shared tokens, each row's own, and the stock logits of all of these, `[T, vocabulary]`.

    The last value is the difference that other shared tokens make to logits, relative to their spread.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    places = torch.arange(CHECK_SHARED + sum(CHECK_TAILS), device=execution_device(model))
    shared, *tails = ((vocabulary // 2 + places) % vocabulary).split((CHECK_SHARED, *CHECK_TAILS))
    logits = [_stock_logits(model, torch.cat((shared, tail)))[CHECK_SHARED:] for tail in tails]
    others = (shared + vocabulary // 3) % vocabulary
    changed = _stock_logits(model, torch.cat((others, tails[-1])))[CHECK_SHARED:]
    return shared, tails, torch.cat(logits), _relative(changed, logits[-1])


def _stock_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits `[tokens, vocabulary]` of a plain sequence."""
    inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens), device=tokens.device)[None]}
    known = {name: value for name, value in inputs.items() if name in parameters_of(model.forward)}
    logits: torch.Tensor = model(**known, use_cache=False).logits[0]
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
    logits, expected = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (logits, expected))
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return float((logits - expected).norm() / spread)
