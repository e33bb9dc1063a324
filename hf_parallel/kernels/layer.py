"""LayerStorage: the keys and values of one layer, and the backend that reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_parallel.kernels.dispatch import backend_for
from hf_parallel.kernels.storage import FIRST_QUANTIZED, QuantizedStorage, Storage, TokenRange


@dataclass(eq=False)
class LayerStorage(Storage):
    """Keys and values of one layer: `[slots * kv_heads, head_dim]` each."""

    quantized: QuantizedStorage | None = None
    """Blocks in 8 bits."""

    def __post_init__(self) -> None:
        self.backend = backend_for(self.keys, self.values)

    def __reduce__(self) -> tuple[type[LayerStorage], tuple[Any, ...]]:
        return LayerStorage, (self.keys, self.values, self.num_kv_heads, self.quantized)  # backends differ by machine

    @property
    def addresses(self) -> list[int]:
        """Addresses of all tensors, which change when the storage grows."""
        tensors = [*self.tensors]
        if self.quantized is not None:
            tensors += self.quantized.tensors
        return [tensor.data_ptr() for tensor in tensors]

    def read(self, tokens: TokenRange) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of tokens: `[kv_heads, length, head_dim]` each."""
        rows = self.rows(tokens)
        if tokens.origin < FIRST_QUANTIZED:
            return self.keys[rows], self.values[rows]
        assert self.quantized is not None, "only blocks in 8 bits are in quantized slots"
        return self.quantized.read(rows, self.keys.dtype)

    def gather(self, rows: torch.Tensor, in_8_bits: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at `rows`, int64 `[n]`: `[n, head_dim]` each.

        `in_8_bits`, bool `[n]`, says which are rows of the quantized storage (None: none).
        """
        if in_8_bits is None or self.quantized is None:
            return self.keys.index_select(0, rows), self.values.index_select(0, rows)
        unquantized_rows = rows.masked_fill(in_8_bits, 0)
        quantized_rows = rows.masked_fill(~in_8_bits, 0)
        quantized_keys, quantized_values = self.quantized.read(quantized_rows, self.keys.dtype)
        is_quantized = in_8_bits[:, None]
        keys = torch.where(is_quantized, quantized_keys, self.keys[unquantized_rows])
        values = torch.where(is_quantized, quantized_values, self.values[unquantized_rows])
        return keys, values
