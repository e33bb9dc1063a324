"""LayerStorage: the keys and values of one layer, and the backend that reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_parallel.kernels.dispatch import backend_for
from hf_parallel.kernels.storage import COMPACT, CompactStorage, Storage, TokenRange


@dataclass(eq=False)
class LayerStorage(Storage):
    """Keys and values of one layer: `[slots * kv_heads, head_dim]` each."""

    compact: CompactStorage | None = None
    """Blocks in 8 bits."""

    def __post_init__(self) -> None:
        self.backend = backend_for(self.keys, self.values)

    def __reduce__(self) -> tuple[type[LayerStorage], tuple[Any, ...]]:
        return LayerStorage, (self.keys, self.values, self.num_kv_heads, self.compact)  # backends differ by machine

    @property
    def addresses(self) -> list[int]:
        """Addresses of all tensors, which change when the storage grows."""
        return [t.data_ptr() for storage in (self, self.compact) if storage is not None for t in storage.tensors]

    def read(self, tokens: TokenRange) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of tokens: `[kv_heads, length, head_dim]` each."""
        rows = self.rows(tokens)
        if tokens.origin < COMPACT:
            return self.keys[rows], self.values[rows]
        assert self.compact is not None, "only blocks in 8 bits are in compact slots"
        return self.compact.read(rows, self.keys.dtype)

    def gather(self, rows: torch.Tensor, packed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at `rows`, int64 `[n]`: `[n, head_dim]` each.

        `packed`, bool `[n]`, says which are rows of the compact storage (None: none).
        """
        if packed is None or self.compact is None:
            return self.keys.index_select(0, rows), self.values.index_select(0, rows)
        own = rows.masked_fill(packed, 0)
        keys, values = self.compact.read(rows.masked_fill(~packed, 0), self.keys.dtype)
        is_packed = packed[:, None]
        return torch.where(is_packed, keys, self.keys[own]), torch.where(is_packed, values, self.values[own])
