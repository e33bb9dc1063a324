"""Masks for stock attention and for flex attention: what the queries of an example see (docs/training.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_recurrent_attention_mask

from hf_parallel.models.probing.rotary import max_positions
from hf_parallel.training.example import ParallelExample
from hf_parallel.training.layout import LayoutView, make_views

IMPLEMENTATION = "hf_parallel_train"
"""Name of the attention implementation of `attention.py`, which is `sdpa` without a layout."""
SUPPORTED = ("sdpa", "eager", "flex_attention", IMPLEMENTATION)
"""Attention implementations that take such a mask."""
Mask: TypeAlias = torch.Tensor | BlockMask
_WITHOUT_MASK = ("mlp", "moe")
"""Types of layers that mix no tokens."""


def stock_mask(
    examples: ParallelExample | Sequence[ParallelExample],
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Mask | dict[str, Mask]:
    """Return the argument `attention_mask` of a model for examples whose keys never move.

    Together with the examples' `input_ids` and `position_ids`, padded to the longest of `T` tokens, stock attention
    computes them exactly. Trees and the dialects `pdos` (with `join="reencode"`), `multiverse` and `threadweaver` are
    such examples.

    Parameters
    ----------
    examples : ParallelExample or list of ParallelExample
        One, or a batch of `B`.
    config : PretrainedConfig
        The model's config, which names its attention implementation and its sliding windows.
    dtype : torch.dtype
        Dtype of the model's parameters.
    device : torch.device or str

    Returns
    -------
    torch.Tensor, BlockMask, or a dict of them by type of layer
        `[B, 1, T, T]`: boolean for `sdpa`; additive, of `dtype`, for `eager`. A `BlockMask` for `flex_attention`. A
        dict if the model has layers with and without a sliding window.

    Raises
    ------
    ValueError
        If the model has fewer positions than an example needs, keys move, the attention implementation takes no such
        mask (`flash_attention_2`), or the model has layers of another type, or with a state.
    """
    states = stateful_kinds(config)
    if states:
        raise ValueError(
            f"{config.model_type} has layers with a state ({', '.join(states)}), which read all tokens in order, "
            "whatever the mask: use tree_logprobs, SharedPrefixGRPOTrainer or prepare_model"
        )
    masks = make_masks(examples, config, dtype, device)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def make_masks(
    examples: ParallelExample | Sequence[ParallelExample],
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Mask]:
    """Return the masks of `stock_mask` by type of layer."""
    implementation = config.get_text_config(decoder=True)._attn_implementation
    if implementation not in SUPPORTED:
        raise ValueError(f"attn_implementation must be one of {list(SUPPORTED)} for a mask, got {implementation!r}")
    batch = [examples] if isinstance(examples, ParallelExample) else list(examples)
    views = [_stock_view(example) for example in batch]
    length = max(map(len, batch))
    check_positions(1 + max(int(example.position_ids.max()) for example in batch), config)
    masks: dict[str, Mask] = {}
    for kind, window in windows(config).items():
        dense = _dense_masks(views, length, window)
        seen = torch.from_numpy(dense)[:, None].to(device)
        masks[kind] = seen
        if implementation == "flex_attention":
            masks[kind] = create_block_mask(_reads(seen), len(batch), None, length, length, device)
        elif implementation == "eager":
            bias = torch.zeros(seen.shape, dtype=dtype, device=device)
            masks[kind] = bias.masked_fill(~seen, torch.finfo(dtype).min)
    for hybrid, parts in _hybrids(config).items():
        for kind in parts:
            if kind in masks:
                masks[hybrid] = masks[kind]
    return masks


def _stock_view(example: ParallelExample) -> LayoutView:
    """Return the only view of an example whose keys never move. Raises `ValueError` if they do."""
    views = make_views(example)
    view = views[0]
    rotations = view.query_positions - example.position_ids[view.queries]
    moved_keys = view.key_positions != example.position_ids[view.keys]
    if len(views) > 1 or rotations.any() or moved_keys.any():
        raise ValueError(
            "this example has tokens that move or are seen at other positions: stock attention cannot compute it; use "
            f"attn_implementation={IMPLEMENTATION!r}"
        )
    return view


def _reads(mask: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda b, h, q, k: mask[b, 0, q, k]


def _dense_masks(views: Sequence[LayoutView], length: int, window: int | None) -> np.ndarray:
    """Return which tokens each token sees, `bool [B, T, T]`. Padding sees the first: attention to no token is NaN."""
    masks = np.zeros((len(views), length, length), bool)
    for mask, view in zip(masks, views, strict=True):
        num_tokens = len(view.queries)
        seen = view.mask(window)
        if len(set(view.keys.tolist())) == len(view.keys):
            mask[:num_tokens, view.keys] = seen
        else:  # tokens in several blocks
            queries, keys = np.nonzero(seen)
            mask[queries, view.keys[keys]] = True
        mask[num_tokens:, 0] = True
    return masks


def check_positions(num_positions: int, config: PretrainedConfig) -> None:
    """Raise `ValueError` if an example needs more positions than a model has."""
    limit = max_positions(config)
    if limit is not None and num_positions > limit:
        raise ValueError(
            f"the example needs {num_positions} positions, but the model has {limit} (max_position_embeddings)"
        )


def windows(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the sliding window of each type of attention layer of a model's config; None: full attention."""
    text = config.get_text_config(decoder=True)
    window = None
    if getattr(text, "use_sliding_window", True):
        window = getattr(text, "sliding_window", None)
    kinds = {kind for kind in _kinds(text) if not _has_state(kind)} - set(_WITHOUT_MASK)
    unsupported = kinds - {"full_attention", "sliding_attention"}
    if unsupported:
        raise ValueError(f"{text.model_type} has layers of the type {sorted(unsupported)}, for which there is no mask")
    if not getattr(text, "layer_types", None):
        return {"": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def stateful_kinds(config: PretrainedConfig) -> list[str]:
    """Return the types of layers of a model's config that keep a state, and take no mask of keys."""
    return [kind for kind in _kinds(config.get_text_config(decoder=True)) if _has_state(kind)]


def _kinds(text: PretrainedConfig) -> list[str]:
    """Return the types of layers of a config, and instead of hybrid ones what they consist of."""
    hybrids = _hybrids(text)
    kinds: set[str] = set()
    for kind in getattr(text, "layer_types", None) or ():
        kinds.update(hybrids.get(kind, [kind]))
    return sorted(kinds)


def _hybrids(config: PretrainedConfig) -> dict[str, list[str]]:
    """Return the types of layers that keep keys and a state, with the types that have a mask each."""
    types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    return {
        kind: list(of)
        for kind, of in LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.items()
        if kind in types and isinstance(of, dict)
    }


def _has_state(kind: str) -> bool:
    return LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind) is create_recurrent_attention_mask


def block_mask(
    views: Sequence[LayoutView | None], shape: tuple[int, int], window: int | None, device: torch.device | str
) -> BlockMask:
    """Return the mask of one view of each example of a batch for flex attention, from its intervals of keys.

    `shape`: numbers of queries and of keys, padded.
    """
    num_queries, num_keys = shape
    num_rows = len(views)
    max_intervals = max((view.begins.shape[1] for view in views if view is not None), default=1)
    begins = np.zeros((num_rows, num_queries, max_intervals), np.int64)
    ends = np.zeros_like(begins)
    query_positions = np.zeros((num_rows, num_queries), np.int64)
    key_positions = np.zeros((num_rows, num_keys), np.int64)
    for row, view in enumerate(views):
        if view is not None:
            q, intervals = view.begins.shape
            begins[row, :q, :intervals] = view.begins
            ends[row, :q, :intervals] = view.ends
            query_positions[row, :q] = view.query_positions
            key_positions[row, : len(view.keys)] = view.key_positions
    return _make_block_mask(
        window,
        begins=torch.from_numpy(begins).to(device),
        ends=torch.from_numpy(ends).to(device),
        query_positions=torch.from_numpy(query_positions).to(device),
        key_positions=torch.from_numpy(key_positions).to(device),
    )


def _make_block_mask(
    window: int | None,
    begins: torch.Tensor,  # [B, Q, intervals]
    ends: torch.Tensor,
    query_positions: torch.Tensor,  # [B, Q]
    key_positions: torch.Tensor,  # [B, K]
) -> BlockMask:
    """Return the mask of queries that see the keys in their intervals, and in a window of positions."""

    def is_seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (begins[b, q, 0] <= k) & (k < ends[b, q, 0])
        for interval in range(1, begins.shape[2]):
            is_inside = (begins[b, q, interval] <= k) & (k < ends[b, q, interval])
            seen = seen | is_inside
        if window is not None:
            distance = query_positions[b, q] - key_positions[b, k]
            seen = seen & (distance < window)
        return seen

    num_rows, num_queries, _ = begins.shape
    return create_block_mask(is_seen, num_rows, None, num_queries, key_positions.shape[1], begins.device)
