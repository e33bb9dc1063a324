"""Arena: one flat storage of keys and values per layer, divided into extents.

A slot holds one token. An extent is a contiguous `[kv_heads, capacity, head_dim]` that starts at the same slot in every
layer, regardless of the layer's dimensions. The arena manages slots and bytes, not blocks or rows.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_parallel.kernels import (
    FIRST_QUANTIZED,
    AttentionPlan,
    LayerStorage,
    QuantizedStorage,
    RotarySpec,
    Storage,
    TokenRange,
    quantized_dtype,
    rotate_by,
    storage_row,
    to_device,
)

GROWTH = 1.5
"""Minimum growth factor of a layer's storage, so that growth copies each token O(1) times (amortized)."""


@dataclass(eq=False)
class Extent:
    """`capacity` slots from slot `origin`. `owners` is the number of blocks in it."""

    origin: int
    capacity: int
    owners: int = 1

    @property
    def is_quantized(self) -> bool:
        """Whether its tokens are stored in 8 bits."""
        return self.origin >= FIRST_QUANTIZED

    def range(self, start: int, length: int) -> TokenRange:
        """Return `length` tokens from index `start`."""
        return TokenRange(self.origin, self.capacity, start, length)


def _reported(change: Callable[..., None]) -> Callable[..., None]:
    """Pass the arguments of a change of the storage to `on_change` of its arena, once it is made."""

    @functools.wraps(change)
    def run(self: Arena, *arguments: Any) -> None:
        change(self, *arguments)
        if self.on_change is not None:
            self.on_change(self, change.__name__, arguments)

    return run


class Arena:
    """Allocates extents and copies tokens between them.

    A layer's storage is allocated at its first write, when its dimensions, dtype and device are known, and grows when
    it has fewer than `num_slots` slots. Extents keep their slots. Free slots at the end are removed from `num_slots`,
    so that storage that could not be allocated is not requested again. Check `fits` before allocating under a budget of
    `max_slots` (None: no limit).
    """

    max_slots: int | None = None
    first_slot: ClassVar[int] = 0
    on_change: Callable[[Arena, str, tuple[Any, ...]], None] | None = None
    """Called after each change of the storage that is not a write of the model, with the method and its arguments."""

    def __init__(self) -> None:
        self.quantized: QuantizedArena | None = None
        self.clear()

    def clear(self) -> None:
        """Release all memory."""
        self.num_slots = 0
        self.layers: dict[int, Any] = {}  # of `Storage`
        self._free: list[tuple[int, int]] = []  # (origin, size), ascending, coalesced
        if self.quantized is not None:
            self.quantized.clear()

    @property
    def cache_dtype(self) -> str | None:
        """Dtype of blocks that no row writes any more, "int8" or "fp8"; None: that of the model."""
        return None if self.quantized is None else self.quantized.name

    @cache_dtype.setter
    def cache_dtype(self, name: str | None) -> None:
        """Choose the dtype of an arena without layers. Raises `ValueError` if it is unknown, or another is in use."""
        dtype = quantized_dtype(name)
        if name == self.cache_dtype:
            return
        if self.layers:
            raise ValueError(f"cache_dtype={name!r}, but the cache holds blocks with cache_dtype={self.cache_dtype!r}")
        self.quantized = None
        if name is not None and dtype is not None:
            self.quantized = QuantizedArena(name, dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers written so far."""
        return sum(layer.bytes_per_token for layer in list(self.layers.values()))  # another thread may add one

    @property
    def reserved_bytes(self) -> int:
        """Bytes of storage held, used or not."""
        num_bytes = 0
        for layer in list(self.layers.values()):
            num_bytes += sum(tensor.nbytes for tensor in layer.tensors)
        if self.quantized is not None:
            num_bytes += self.quantized.reserved_bytes
        return num_bytes

    @property
    def used_slots(self) -> int:
        """Number of slots that are allocated."""
        return self.num_slots - sum(size for _, size in self._free)

    def fits(self, size: int) -> bool:
        """Return whether `size` contiguous slots are free."""
        if self.max_slots is None or size <= self.max_slots - self.num_slots:
            return True
        return any(free >= size for _, free in self._free)

    def allocate(self, capacities: Sequence[int]) -> list[Extent]:
        """Allocate extents of these capacities, adjacent in memory."""
        origins = itertools.accumulate(capacities, initial=self.first_slot + self._allocate_slots(sum(capacities)))
        return [Extent(origin, capacity) for origin, capacity in zip(origins, capacities, strict=False)]

    def release(self, extent: Extent) -> None:
        """Remove one owner of an extent, which may be quantized; its slots are freed with the last one."""
        extent.owners -= 1
        if extent.owners or not extent.capacity:
            return
        arena: Arena = self
        if extent.is_quantized and self.quantized is not None:
            arena = self.quantized
        arena._free_slots(extent.origin % FIRST_QUANTIZED, extent.capacity)

    @_reported
    def grow(self) -> None:
        """Grow every layer to `num_slots`, so that a lack of memory is detected before any layer is written."""
        for layer in self.layers.values():
            if layer.keys.shape[0] < self.num_slots * layer.num_kv_heads:
                self._grow(layer)

    def relocate(self, tokens: Sequence[tuple[Extent, int, int]], capacities: Sequence[int]) -> list[Extent]:
        """Move tokens, given as (extent, start, length), to new extents of these capacities, adjacent in memory.

        The new extents may overlap the old ones, so that growth leaves no holes. If memory runs out, nothing changes.
        """
        assert all(e.is_quantized == (self.first_slot > 0) for e, _, _ in tokens), "blocks in 8 bits are not written"
        num_slots = self.num_slots
        free = list(self._free)
        sources = [extent.range(start, length) for extent, start, length in tokens]
        for extent, _, _ in tokens:
            self.release(extent)
        try:
            extents = self.allocate(capacities)
            self.grow()
            targets = []
            for extent, source in zip(extents, sources, strict=True):
                targets.append(extent.range(0, source.length))
            self._copy_all(sources, targets)
        except BaseException:
            for extent, _, _ in tokens:
                extent.owners += 1
            self.num_slots = num_slots
            self._free = free
            raise
        return extents

    @_reported
    def limit(self, max_slots: int) -> None:
        """Set the budget, of at least `num_slots`, and release memory beyond it."""
        self.max_slots = max_slots
        for layer in self.layers.values():
            if layer.keys.shape[0] > max_slots * layer.num_kv_heads:
                layer.resize(self.num_slots)

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store the packed new keys and values `[kv_heads, T, head_dim]` of a pass at its plan's locations."""
        heads, _, head_dim = key.shape
        layer = self.layers.get(layer_idx)
        if layer is None:
            with torch.inference_mode(False):  # the cache may later be written outside of inference mode
                keys = key.new_zeros(0, head_dim)
                values = value.new_zeros(0, value.shape[-1])
                layer = LayerStorage(keys, values, heads)
                if self.quantized is not None:
                    layer.quantized = self.quantized.storage_of(layer)
                    self.quantized.layers[layer_idx] = layer.quantized
                self.layers[layer_idx] = layer
        stored = (layer.num_kv_heads, layer.keys.shape[-1], layer.keys.dtype, layer.keys.device)
        if stored != (heads, head_dim, key.dtype, key.device):
            raise ValueError(
                "this cache holds keys of {} heads x {}, {} on {}; got ".format(*stored)
                + f"{heads} x {head_dim} in {key.dtype} on {key.device}: a cache serves the model that filled it"
            )
        if layer.keys.shape[0] < self.num_slots * heads:
            self._grow(layer)
        layer.backend.append(layer.keys, layer.values, key, value, plan)

    @_reported
    def copy(
        self, source: TokenRange, target: TokenRange, delta: int = 0, rotary: dict[int, RotarySpec | None] | None = None
    ) -> None:
        """Copy tokens, which may be quantized, to another extent and rotate their keys by `delta` positions."""
        self.grow()
        for layer_idx, layer in self.layers.items():
            spec = rotary[layer_idx] if delta and rotary is not None else None
            rotated = layer.keys
            unrotated = layer.values
            if spec is not None and spec.of_values:
                rotated = layer.values
                unrotated = layer.keys
            if source.origin < FIRST_QUANTIZED:
                layer.backend.move(rotated, unrotated, layer.num_kv_heads, source, target, delta, spec)
                continue
            rows = layer.rows(target)
            layer.keys[rows], layer.values[rows] = layer.read(source)
            if spec is not None:
                rotated[rows] = rotate_by(rotated[rows], delta, spec)

    def copy_many(self, sources: Sequence[TokenRange], targets: Sequence[TokenRange]) -> None:
        """Copy tokens, none of them quantized, to free places of other extents; their keys are not rotated."""
        self.grow()
        self._copy_all(sources, targets)

    @_reported
    def quantize(self, source: TokenRange, target: TokenRange) -> None:
        """Copy tokens to a quantized extent."""
        assert self.quantized is not None, "no dtype was chosen for quantized slots"
        self.quantized.grow()
        for layer in self.layers.values():
            keys, values = layer.read(source)
            layer.quantized.write(layer.rows(target), keys, values)

    @_reported
    def clear_unused(self, used: Sequence[TokenRange]) -> None:
        """Overwrite everything but the `used` tokens with zeros."""
        for layer in self.layers.values():
            unused = torch.ones(len(layer.keys), dtype=torch.bool, device=layer.keys.device)
            for tokens in used:
                unused[layer.rows(tokens)] = False
            for tensor in layer.tensors:
                tensor[unused] = tensor.new_zeros(tensor.shape[-1])

    @_reported
    def _copy_all(self, sources: Sequence[TokenRange], targets: Sequence[TokenRange]) -> None:
        """Copy tokens in all layers, or in none: targets that are no sources are free, so that copies can go back."""
        rows: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        done: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        try:
            for layer in self.layers.values():
                heads = layer.num_kv_heads
                device = layer.keys.device
                if (heads, device) not in rows:
                    from_rows = _storage_rows(sources, heads, device)
                    to_rows = _storage_rows(targets, heads, device)
                    rows[heads, device] = from_rows, to_rows
                from_rows, to_rows = rows[heads, device]
                for storage in layer.tensors:
                    storage[to_rows] = storage[from_rows]
                    done.append((storage, from_rows, to_rows))
        except BaseException:
            for storage, from_rows, to_rows in done:
                storage[from_rows] = storage[to_rows]
            raise

    def _grow(self, layer: Storage) -> None:
        """Reallocate a layer's storage with more slots."""
        slots = int(layer.keys.shape[0] // layer.num_kv_heads * GROWTH)
        if self.max_slots is not None:
            slots = min(slots, self.max_slots)
        layer.resize(max(self.num_slots, slots))

    def _allocate_slots(self, size: int) -> int:
        """First fit; returns the origin."""
        if size == 0:
            return 0
        for i, (origin, free) in enumerate(self._free):
            if free >= size:
                if free > size:
                    self._free[i] = (origin + size, free - size)
                else:
                    del self._free[i]
                return origin
        self.num_slots += size
        return self.num_slots - size

    def _free_slots(self, origin: int, size: int) -> None:
        index = bisect.bisect(self._free, (origin, size))
        if index < len(self._free):
            following, length = self._free[index]
            if origin + size == following:
                size += length
                del self._free[index]
        if index:
            previous, length = self._free[index - 1]
            if previous + length == origin:
                index -= 1
                origin = previous
                size += length
                del self._free[index]
        if origin + size == self.num_slots:
            self.num_slots = origin
        else:
            self._free.insert(index, (origin, size))


class QuantizedArena(Arena):
    """Arena of the slots from `FIRST_QUANTIZED` on, whose keys and values have 8 bits."""

    first_slot = FIRST_QUANTIZED

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self._dtype = dtype

    def storage_of(self, layer: LayerStorage) -> QuantizedStorage:
        """Return empty storage for blocks of a layer."""
        keys = layer.keys.new_zeros(0, layer.keys.shape[-1], dtype=self._dtype)
        values = layer.values.new_zeros(0, layer.values.shape[-1], dtype=self._dtype)
        scales = layer.keys.new_zeros(0, 2, dtype=torch.float32)
        return QuantizedStorage(keys, values, layer.num_kv_heads, scales)


def _storage_rows(ranges: Sequence[TokenRange], num_kv_heads: int, device: torch.device) -> torch.Tensor:
    """Storage rows of several ranges of tokens: int64 `[kv_heads * tokens]`."""
    origin, capacity, start, length = np.array(ranges, np.int64).reshape(-1, 4).T
    tokens = np.repeat(np.arange(len(length)), length)  # the range of each token
    index = np.arange(len(tokens)) - np.repeat(np.cumsum(length) - length - start, length)
    heads = np.arange(num_kv_heads)[:, None]
    rows = storage_row(origin[tokens], capacity[tokens], index, num_kv_heads, heads)
    return to_device(rows.reshape(-1), device)
