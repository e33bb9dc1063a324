"""A block cache of one small layer, whose keys and values say which tokens they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scenes import rotate_to

from hf_parallel.cache import Block, BlockCache, Segment, View
from hf_parallel.kernels import RotarySpec

KV_HEADS, HEAD_DIM = 2, 6
BYTES_PER_TOKEN = 2 * KV_HEADS * HEAD_DIM * 8  # one layer, float64
ROTARY = RotarySpec((1.0, 0.3), interleaved=False)  # turns 4 of 6 dimensions


def unrotated(tokens: Sequence[int], layer: int = 0) -> torch.Tensor:
    """A key for each token, float64 [kv_heads, len(tokens), head_dim], all different."""
    names = torch.tensor(tokens, dtype=torch.float64)[None, :, None]
    place = torch.arange(KV_HEADS * HEAD_DIM).reshape(KV_HEADS, 1, HEAD_DIM)
    return torch.sin(names * (place + 1) + layer)


def append(cache: BlockCache, *brought: tuple[View, Sequence[int]]) -> None:
    """What a model of one layer does to the cache in a forward pass."""
    forward = cache.prepare([Segment(view, len(tokens)) for view, tokens in brought])
    tokens = [token for _, run in brought for token in run]
    keys = rotate_to(unrotated(tokens), forward.position_ids, ROTARY)
    cache.pool.arena.write(0, keys, unrotated(tokens, 1), forward.plan)
    cache.commit()


def stored(cache: BlockCache, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    layer = cache.pool.arena.layers[0]
    rows = layer.rows(block.tokens)
    return layer.keys[rows], layer.values[rows]


def assert_holds(cache: BlockCache, block: Block, tokens: Sequence[int]) -> None:
    """The block holds these tokens' values, and their keys at the positions that follow from its base."""
    assert block.length == len(tokens)
    if tokens:
        keys, values = stored(cache, block)
        at = torch.arange(block.base, block.base + len(tokens))
        torch.testing.assert_close(keys, rotate_to(unrotated(tokens), at, ROTARY), rtol=0, atol=1e-12)
        assert torch.equal(values, unrotated(tokens, 1))


def new_cache() -> BlockCache:
    return BlockCache({0: ROTARY})
