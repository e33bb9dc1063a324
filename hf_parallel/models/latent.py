"""Latent attention (MLA, DeepSeek-V2, section 2.1): layers whose cache holds a latent per token, not keys and values.

Such a layer passes a latent and the rotated part of its keys to `Cache.update`, and expands both to the keys and values
of its heads before it calls the attention function. Over blocks, attention reads what is stored (`LatentHeads`).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_parallel.kernels import LatentHeads, LayerStorage

_expansions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Name of the linear layer that expands latents, by the module that calls the attention function."""


def latent_heads(
    module: nn.Module, key: torch.Tensor, value: torch.Tensor, layer: LayerStorage, expands: bool = True
) -> LatentHeads | None:
    """Return the heads of an attention layer that stores latents; None if it stores `key` and `value` themselves.

    `key` and `value` `[1, heads, T, ..]` are what the module passes to the attention function, `expands` is that of
    `LatentHeads`. Raises `LookupError` if it has no linear layer from a latent to both.
    """
    rank = layer.keys.shape[-1]
    lead = layer.values.shape[-1]
    heads = key.shape[1]
    key_dim = key.shape[-1]
    value_dim = value.shape[-1]
    if not are_latents((layer.num_kv_heads, rank, lead), (heads, key_dim, value_dim)):
        return None
    dims = key_dim - lead + value_dim
    name = _expansions.get(module)
    if name is None:
        name = _find_linear(module, rank, heads * dims)
        _expansions[module] = name
    linear = getattr(module, name)  # an adapter may have replaced it
    if type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not linear.weight.is_meta:
        weight = linear.weight
    else:  # quantized, with an adapter, or offloaded
        weight = linear(torch.eye(rank, dtype=key.dtype, device=key.device)).T
    return LatentHeads(weight.to(layer.keys.dtype).view(heads, dims, rank), key_dim - lead, expands)


def are_latents(cached: tuple[int, int, int], attended: tuple[int, int, int]) -> bool:
    """Whether a layer caches latents, given its KV heads and sizes of keys and values, cached and attended to."""
    cached_heads, cached_key_dim, cached_value_dim = cached
    heads, key_dim, value_dim = attended
    return cached_key_dim != key_dim or (cached_heads != heads and cached_value_dim != value_dim)


def rotated_first(x: torch.Tensor, lead: int) -> torch.Tensor:
    """Move the last `lead` dimensions of queries or keys, the rotated ones of latent attention, before the others."""
    return torch.cat((x[..., -lead:], x[..., :-lead]), dim=-1)


def _find_linear(module: nn.Module, inputs: int, outputs: int) -> str:
    for name, child in module.named_children():
        if (getattr(child, "in_features", None), getattr(child, "out_features", None)) == (inputs, outputs):
            return name
    raise LookupError(f"has no linear layer from its {inputs} cached dimensions to keys and values ({outputs})")
