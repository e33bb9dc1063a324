"""Baselines of block attention: FlashAttention over dense copies, and FlashInfer's cascade."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_parallel.cache import Block

from .layer import Layer

PAGE = 16
"""Number of tokens in a page of FlashInfer's cache."""
WORKSPACE_BYTES = 256 << 20


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute PyTorch's FlashAttention for one new token per row, without sharing: `[rows, heads, head_dim]`.

    `query` has the same shape; keys and values are `[rows, kv_heads, length, head_dim]`. The heads of a KV group become
    query rows, so that each key is read once for all of them.
    """
    rows, heads, dim = query.shape
    grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], dim)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).reshape(rows, heads, dim)


def dense_copies(layer: Layer, root: Block, leaves: list[Block]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[rows, kv_heads, length, head_dim]` with a copy of the prefix per row."""
    keys, values = (
        torch.cat((shared.expand(len(leaves), -1, -1, -1), own), dim=2)
        for shared, own in zip(layer.held([root]), layer.held(leaves), strict=True)
    )
    return keys, values


class Cascade:
    """FlashInfer's cascade attention over a shared prefix and suffixes in one page table; `ImportError` without it."""

    def __init__(self, layer: Layer, root: Block, leaves: list[Block]) -> None:
        flashinfer: Any = importlib.import_module("flashinfer")
        f, rows, device = layer.features, len(leaves), layer.device
        shared, own = root.length // PAGE, leaves[0].length // PAGE
        # [pages, keys or values, PAGE, kv_heads, head_dim]
        self._pages = torch.empty(shared + rows * own, 2, PAGE, f.kv_heads, f.head_dim, dtype=f.dtype, device=device)
        for pages, blocks in ((self._pages[:shared], [root]), (self._pages[shared:], leaves)):
            for which, states in enumerate(layer.held(blocks)):
                pages[:, which] = states.transpose(1, 2).reshape(-1, PAGE, f.kv_heads, f.head_dim)

        def ints(*values: Any) -> torch.Tensor:
            return torch.arange(*values, dtype=torch.int32, device=device)

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
        self._wrapper.plan(
            [ints(0, rows + 1, rows), ints(rows + 1)],
            [ints(0, shared + 1, shared), ints(0, rows * own + 1, own)],
            [ints(shared), ints(shared, shared + rows * own)],
            [ints(PAGE, PAGE + 1), torch.full((rows,), PAGE, dtype=torch.int32, device=device)],
            *(f.heads, f.kv_heads, f.head_dim, PAGE),
            sm_scale=f.scale,
            q_data_type=f.dtype,
        )

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Return the attention of `query`, `[rows, heads, head_dim]`."""
        return self._wrapper.run(query, self._pages)
