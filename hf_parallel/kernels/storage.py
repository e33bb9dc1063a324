"""Layout of a layer's storage: the row of `[slots * kv_heads, head_dim]` that holds a token's key or value.

An extent of `capacity` slots at slot `origin` is a contiguous `[kv_heads, capacity, head_dim]` in every layer.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch

Slot = int | np.ndarray
Index = TypeVar("Index", int, np.ndarray, torch.Tensor)


def storage_row(origin: Slot, capacity: Slot, index: Index, num_kv_heads: int, head: Index | int = 0) -> Index:
    """Return the row of the token at `index` of an extent, for KV head `head`."""
    return origin * num_kv_heads + head * capacity + index  # type: ignore[return-value]


class TokenRange(NamedTuple):
    """`length` tokens from index `start` of the extent of `capacity` slots at slot `origin`."""

    origin: int
    capacity: int
    start: int
    length: int

    def rows(self, num_kv_heads: int, device: torch.device) -> torch.Tensor:
        """Storage rows of the tokens: int64 `[kv_heads, length]`."""
        index = self.start + torch.arange(self.length, device=device)
        heads = torch.arange(num_kv_heads, device=device)[:, None]
        return storage_row(self.origin, self.capacity, index, num_kv_heads, heads)
