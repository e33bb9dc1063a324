"""Compares the logits that a model computes over blocks with those over a plain sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from hf_parallel.cache import Block, BlockCache, LayerReads, Segment
from hf_parallel.cache.placement import execution_device
from hf_parallel.models.attention import UnsupportedModelError, block_attention_enabled
from hf_parallel.models.dense import dense_logits
from hf_parallel.models.mixers import Mixer, cache_argument, keep_states, mixers_wrapped, packed_calls, takes_use_cache
from hf_parallel.models.rotary import tolerance
from hf_parallel.models.signature import parameters_of, takes

CHECK_SHARED, CHECK_TAILS = 5, (2, 3)  # numbers of shared tokens and of each row's own in the comparison of logits
LOGITS_TOLERANCE = (1e-2, 0.7)
"""Relative errors allowed in float32 and in half precision, in which a token may be routed to other experts. The
relative error of unrelated logits is 1.4."""


class OwnAttentionError(UnsupportedModelError):
    """Raised if block attention cannot replace a model's attention, which may run over dense copies of rows."""


def check_logits(
    model: PreTrainedModel, keyword: bool, mixers: Sequence[Mixer], reads: Mapping[int, LayerReads]
) -> None:
    """Raise `UnsupportedModelError` if logits over blocks differ from those over a plain sequence."""
    shared, tails, expected = _rows(model)
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
    if not _differ(logits, expected, stored):
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
    shared, tails, expected = _rows(model)
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
            if not _differ(logits, ends, logits):
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


def _rows(model: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return shared tokens, each row's own, and the stock logits of all of these, `[T, vocabulary]`."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    places = torch.arange(CHECK_SHARED + sum(CHECK_TAILS), device=execution_device(model))
    shared, *tails = ((vocabulary // 2 + places) % vocabulary).split((CHECK_SHARED, *CHECK_TAILS))
    logits = []
    for row in (torch.cat((shared, tail))[None] for tail in tails):
        inputs = {"input_ids": row, "position_ids": torch.arange(row.shape[1], device=row.device)[None]}
        known = {name: value for name, value in inputs.items() if name in parameters_of(model.forward)}
        logits.append(model(**known, use_cache=False).logits[0, CHECK_SHARED:])
    return shared, tails, torch.cat(logits)


def _differ(logits: torch.Tensor, expected: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether logits differ by more than the dtype of `stored` keys allows."""
    same = torch.equal(logits.isfinite(), expected.isfinite())  # a model may forbid tokens
    logits, expected = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (logits, expected))
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return not same or bool((logits - expected).norm() > tolerance(stored, LOGITS_TOLERANCE) * spread)
