"""Attention layer over a block cache with random queries, keys and values, and block layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_parallel.cache import Block, BlockCache, ForwardPass, Segment
from hf_parallel.kernels import AttentionParams, RotarySpec, block_attention

HEADER = 16
"""Number of tokens in the headers of a Hogwild! view."""


@dataclass(frozen=True)
class Features:
    """Shape and options of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    rotary: RotarySpec | None = None
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the key and value of a token."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return self.head_dim**-0.5


class Layer:
    """`num_layers` layers with the same features over one cache; the first one is measured.

    `forward` is the last pass, `query` `[T, heads, head_dim]` its queries, and `new` its new keys and values,
    `[kv_heads, T, head_dim]` each.
    """

    def __init__(self, features: Features, device: torch.device, num_layers: int = 1) -> None:
        self.features, self.device, self.num_layers = features, device, num_layers
        self.cache = BlockCache(dict.fromkeys(range(num_layers), features.rotary), device=device)
        self.sinks = self._draw(features.heads) if features.sinks else None
        self.forward: ForwardPass
        self.query: torch.Tensor
        self.new: tuple[torch.Tensor, torch.Tensor]

    def step(self, segments: Sequence[Segment]) -> None:
        """Lay out a forward pass and store its new keys and values."""
        self.draw(sum(segment.num_tokens for segment in segments))
        self.forward = self.cache.prepare(segments)
        for layer_idx in range(self.num_layers):
            self.write(layer_idx)
        self.cache.commit()

    def draw(self, total: int) -> None:
        """Draw queries, keys and values of `total` new tokens."""
        f = self.features
        self.query = self._draw(total, f.heads, f.head_dim)
        self.new = self._draw(f.kv_heads, total, f.head_dim), self._draw(f.kv_heads, total, f.head_dim)

    def write(self, layer_idx: int = 0) -> None:
        """Store the new keys and values of the pass."""
        self.cache.pool.arena.write(layer_idx, *self.new, self.forward.plan)

    def attend(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the block attention of the last pass, `[T, heads, head_dim]`."""
        storage = self.cache.pool.arena.layers[layer_idx]
        f = self.features
        params = AttentionParams(f.kv_heads, f.scale, f.rotary, f.softcap, self.sinks, f.window)
        return block_attention(self.query, storage.keys, storage.values, self.forward.plan, params)

    def fill(self) -> None:
        """Draw all keys and values, in every slot."""
        for storage in self.cache.pool.arena.layers.values():
            storage.keys.normal_()
            storage.values.normal_()

    def held(self, blocks: Sequence[Block]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of blocks that were created together, `[blocks, kv_heads, length, head_dim]`."""
        f, storage, extent = self.features, self.cache.pool.arena.layers[0], blocks[0].extent
        shape = len(blocks), f.kv_heads, extent.capacity, f.head_dim
        first = extent.origin * f.kv_heads
        rows = slice(first, first + len(blocks) * f.kv_heads * extent.capacity)
        keys, values = (states[rows].view(shape)[:, :, : blocks[0].length] for states in (storage.keys, storage.values))
        return keys, values

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.features.dtype)


def rotary_of(head_dim: int, part: int = 1, interleaved: bool = False) -> RotarySpec:
    """Return the rotary embedding with base 10000 over `1 / part` of the head."""
    pairs = head_dim // 2 // part
    return RotarySpec(tuple(10000.0 ** (-i / pairs) for i in range(pairs)), interleaved)


# Layouts. Blocks get their lengths without a prefill; `Layer.fill` draws their content.


def new_blocks(layer: Layer, lengths: Sequence[int], base: int = 0, spare: int = 0) -> list[Block]:
    """Return blocks of `lengths` tokens with capacity for `spare` more tokens, followed by a block that no row sees."""
    blocks = layer.cache.pool.new_blocks(len(lengths), max(lengths) + spare, base)
    layer.cache.pool.new_block(HEADER)
    for block, length in zip(blocks, lengths, strict=True):
        block.length = length
    return blocks


def shared_prefix(layer: Layer, prefix: int, suffixes: Sequence[int], spare: int = 1) -> list[Segment]:
    """Return the segments of a decode step of rows over one prefix, with suffixes of these lengths."""
    (root,) = new_blocks(layer, [prefix])
    return [Segment([root, leaf], 1) for leaf in new_blocks(layer, suffixes, base=prefix, spare=spare)]


def hogwild(layer: Layer, workers: int, tokens: int, spare: int = 1) -> list[Segment]:
    """Return the segments of a decode step of workers that see each other's unfinished steps before their own.

    There are `tokens` unique tokens: half are shared, half belong to the workers, in unequal parts.
    """
    (prompt,) = new_blocks(layer, [tokens // 2])
    headers = new_blocks(layer, [HEADER, HEADER])
    rest = tokens - tokens // 2 - 2 * HEADER
    parts = [rest * (2 + i) // (workers * (workers + 3) // 2) for i in range(workers)]
    parts[-1] += rest - sum(parts)
    own = new_blocks(layer, parts, spare=spare)
    return [
        Segment([prompt, headers[0], *(other for other in own if other is not mine), headers[1], mine], 1)
        for mine in own
    ]
