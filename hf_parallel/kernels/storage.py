"""Layout of a layer's storage: the row of `[slots * kv_heads, head_dim]` that holds a token's key or value.

An extent of `capacity` slots at slot `origin` is a contiguous `[kv_heads, capacity, head_dim]` in every layer. Slots
from `FIRST_QUANTIZED` on are in another storage, which holds keys and values in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

FIRST_QUANTIZED = 1 << 30
"""First slot of quantized storage."""
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_FP8_CAPABILITY = (8, 9)

Slot = int | np.ndarray
Index = TypeVar("Index", int, np.ndarray, torch.Tensor)


def quantized_dtype(name: object) -> torch.dtype | None:
    """Return the dtype of quantized storage that `cache_dtype` names; raise `ValueError` for an unknown name."""
    if name is None:
        return None
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise ValueError(f"cache_dtype must be one of {list(_DTYPES)} or None, got {name!r}")


def with_rows(old: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a copy of a tensor with another number of rows; new ones are zero.

    Raises `torch.OutOfMemoryError`, also on the CPU, whose allocator raises a plain `RuntimeError`.
    """
    with torch.inference_mode(False), torch.no_grad():
        try:
            new = old.new_zeros(rows, *old.shape[1:])
        except RuntimeError as error:
            raise torch.OutOfMemoryError(f"no memory for {rows} rows of {list(old.shape[1:])}") from error
        new[: len(old)] = old[:rows]
    return new


def storage_row(origin: Slot, capacity: Slot, index: Index, num_kv_heads: int, head: Index | int = 0) -> Index:
    """Return the row of the token at `index` of an extent, for KV head `head`."""
    return origin % FIRST_QUANTIZED * num_kv_heads + head * capacity + index  # type: ignore[return-value]


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


@dataclass(eq=False)
class Storage:
    """Tensors of one layer, each with a row for every slot and KV head."""

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int
    names: ClassVar[tuple[str, ...]] = ("values", "keys")  # keys last: where they have grown, all have

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, `[slots * kv_heads, ..]` each."""
        return [getattr(self, name) for name in self.names]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in this layer."""
        bytes_per_head = sum(tensor.shape[-1] * tensor.element_size() for tensor in self.tensors)
        return self.num_kv_heads * bytes_per_head

    def rows(self, tokens: TokenRange) -> torch.Tensor:
        """Storage rows of tokens: int64 `[kv_heads, length]`."""
        return tokens.rows(self.num_kv_heads, self.keys.device)

    def resize(self, slots: int) -> None:
        """Change the number of slots; new ones are zero, never NaN."""
        rows = slots * self.num_kv_heads
        resized = dict[str, torch.Tensor]()
        for name, old in zip(self.names, self.tensors, strict=True):
            if old.shape[0] != rows:
                resized[name] = with_rows(old, rows)
        vars(self).update(resized)  # all or none, if memory runs out


@dataclass(eq=False)
class QuantizedStorage(Storage):
    """Keys and values of one layer in 8 bits, each vector of a token and head with a scale of its own.

    A scale per vector fits tokens of any size and moves with its token: a block can be split anywhere.
    """

    scales: torch.Tensor
    """`float32 [slots * kv_heads, 2]`. Factors of the row's key and value."""
    names = ("scales", "values", "keys")

    def __post_init__(self) -> None:
        if self.is_float and self.keys.is_cuda and torch.cuda.get_device_capability(self.keys.device) < _FP8_CAPABILITY:
            raise ValueError(f"cache_dtype='fp8' needs a GPU of compute capability {_FP8_CAPABILITY}: choose 'int8'")

    @property
    def is_float(self) -> bool:
        """Whether the dtype is fp8, not int8."""
        return self.keys.is_floating_point()

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Round keys and values `[.., head_dim]` to 8 bits and store them at `rows`, int64 `[..]`."""
        most = _LARGEST[self.keys.dtype]
        tiny = torch.finfo(torch.float32).tiny
        for index, (stored, new) in enumerate(((self.keys, keys), (self.values, values))):
            scale = new.abs().amax(-1).float() / most
            divisor = scale.clamp(min=tiny)[..., None]
            scaled = (new.float() / divisor).clamp(-most, most)
            if not self.is_float:
                scaled = scaled.round()
            stored[rows] = scaled.to(stored.dtype)
            self.scales[rows, index] = scale

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at `rows`, int64 `[..]`: `[.., head_dim]` each."""
        scales = self.scales[rows]
        keys = dequantize(self.keys[rows], scales[..., 0], dtype)
        values = dequantize(self.values[rows], scales[..., 1], dtype)
        return keys, values


def dequantize(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return vectors in 8 bits `[.., head_dim]` times their scales `[..]`."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return (quantized.to(wide) * scales[..., None].to(wide)).to(dtype)
