"""Masks for stock attention: an example whose keys never move, as `position_ids` and a 4D boolean mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_parallel.training.example import ParallelExample
from hf_parallel.training.layout import View, make_views

IMPLEMENTATION = "hf_parallel_train"
"""Name of the attention implementation of `attention.py`, which is `sdpa` without a layout."""
SUPPORTED = ("sdpa", "eager", IMPLEMENTATION)
"""Attention implementations that take a 4D mask."""


def stock_view(example: ParallelExample) -> View:
    """Return the only view of an example whose keys never move. Raises `ValueError` if they do."""
    views = make_views(example)
    view = views[0]
    rotations = view.query_positions - example.position_ids[view.queries]
    if len(views) > 1 or rotations.any() or (view.key_positions != example.position_ids[view.keys]).any():
        raise ValueError(
            "this example has tokens that move or are seen at other positions: stock attention cannot compute it; use "
            "attn_implementation='hf_parallel_train'"
        )
    return view


def dense_mask(example: ParallelExample, window: int | None = None) -> np.ndarray:
    """Return which tokens each token sees, `bool [T, T]`. Raises `ValueError` as `stock_view` does."""
    view = stock_view(example)
    mask = np.zeros((len(example), len(example)), bool)
    queries, keys = np.nonzero(view.mask(window))
    mask[view.queries[queries], view.keys[keys]] = True
    return mask


def windows(config: Any) -> dict[str, int | None]:
    """Return the sliding window of each type of layer of a model's config; None: full attention."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    types = set(getattr(text, "layer_types", None) or ())
    if other := types - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{text.model_type} has layers of the type {sorted(other)}, for which there is no mask")
    if not types:
        return {"": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(types)}


def stock_mask(
    example: ParallelExample, config: Any, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return the argument `attention_mask` of a model for an example, `[1, 1, T, T]`; by type of layer if they differ.

    It is boolean for `sdpa` and additive, of `dtype`, for `eager`, which adds it to the scores. Raises `ValueError` for
    other attention implementations.
    """
    implementation = config.get_text_config(decoder=True)._attn_implementation
    if implementation not in SUPPORTED:
        raise ValueError(f"attn_implementation must be one of {list(SUPPORTED)} for a 4D mask, got {implementation!r}")
    masks = {}
    for kind, window in windows(config).items():
        seen = torch.from_numpy(dense_mask(example, window))[None, None].to(device)
        if implementation == "eager":
            added = torch.zeros(seen.shape, dtype=dtype, device=device)
            seen = added.masked_fill(~seen, torch.finfo(dtype).min)
        masks[kind] = seen
    return masks if len(masks) > 1 else next(iter(masks.values()))
