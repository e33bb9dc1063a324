"""LayerStorage: the keys and values of one layer, and the backend that reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_parallel.kernels.dispatch import backend_for
from hf_parallel.kernels.storage import TokenRange


@dataclass(eq=False)
class LayerStorage:
    """Keys and values of one layer: `[slots * kv_heads, head_dim]` each."""

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int

    def __post_init__(self) -> None:
        self.backend = backend_for(self.keys, self.values)

    def __reduce__(self) -> tuple[type[LayerStorage], tuple[torch.Tensor, torch.Tensor, int]]:
        return LayerStorage, (self.keys, self.values, self.num_kv_heads)  # another machine may have another backend

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in this layer."""
        return self.num_kv_heads * sum(t.shape[-1] * t.element_size() for t in (self.keys, self.values))

    def rows(self, tokens: TokenRange) -> torch.Tensor:
        """Storage rows of tokens: int64 `[kv_heads, length]`."""
        return tokens.rows(self.num_kv_heads, self.keys.device)
