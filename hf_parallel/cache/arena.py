"""The arena: where keys and values lie. One flat storage per layer, cut into extents that are never interleaved.

An extent is a contiguous `[kv_heads, capacity, head_dim]` in every layer at the same slot, so that one integer says
where a block is, whatever the layer's dimensions. The arena knows slots and bytes; it knows no block and no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_parallel.kernels import AttentionPlan, RotarySpec, to_device
from hf_parallel.kernels.dispatch import append, move
from hf_parallel.kernels.work import Place

GROWTH = 1.5
"""Factor by which storage that is in use grows, so that past tokens are copied a bounded number of times."""


@dataclass(eq=False)
class Extent:
    """`capacity` slots from `origin` on. `owners` counts the blocks that lie in it."""

    origin: int
    capacity: int
    owners: int = 1


@dataclass(eq=False)
class LayerStorage:
    """One layer's keys and values: `[slots * kv_heads, head_dim]` each."""

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's key and value take in this layer."""
        return self.num_kv_heads * sum(t.shape[-1] * t.element_size() for t in (self.keys, self.values))

    def rows(self, extent: Extent, start: int, stop: int) -> torch.Tensor:
        """Storage rows of an extent's tokens `start <= j < stop`: int64 `[kv_heads, stop - start]`."""
        heads = torch.arange(self.num_kv_heads, device=self.keys.device)[:, None] * extent.capacity
        return extent.origin * self.num_kv_heads + heads + torch.arange(start, stop, device=self.keys.device)


Run = tuple[Extent, int, int]
"""Tokens of an extent: the first, and how many."""


class Arena:
    """Hands out extents and moves what is in them.

    Storage of a layer appears with its first write, when its dimensions, dtype and device are known, and grows by
    reallocation when more slots have been handed out than it has; extents keep their slots for life. Slots behind the
    last extent are handed out no longer, so that what could not be had is not asked for again.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self.layers: dict[int, LayerStorage] = {}
        self._free: list[tuple[int, int]] = []  # (origin, size), ascending, coalesced

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers written so far."""
        return sum(layer.bytes_per_token for layer in self.layers.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of storage held, used or not."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def allocate(self, capacity: int, count: int = 1) -> list[Extent]:
        """Hand out `count` extents of `capacity` slots each, one after another in memory."""
        size = capacity * count
        origin = self._take(size)
        return [Extent(origin + i * capacity, capacity) for i in range(count)]

    def release(self, extent: Extent) -> None:
        """Give up one block's share of an extent; its slots are free when no block lies in it any more."""
        extent.owners -= 1
        if extent.owners == 0 and extent.capacity:
            self._give(extent.origin, extent.capacity)

    def grow(self) -> None:
        """Make sure that every layer has the slots that were handed out, before anything is written to one of them."""
        for layer in self.layers.values():
            self._grow(layer)

    def rehouse(self, runs: Sequence[Run], capacity: int) -> list[Extent]:
        """Move runs of tokens into extents of `capacity` slots each, one after another in memory.

        Their old extents are released first and the new ones may lie over them, so that growth leaves no holes.
        """
        before = self.num_slots, list(self._free)
        for extent, _, _ in runs:
            self.release(extent)
        try:
            extents = self.allocate(capacity, len(runs))
            self.grow()
            self._move(runs, [(extent, 0, length) for extent, (_, _, length) in zip(extents, runs, strict=True)])
        except BaseException:
            for extent, _, _ in runs:
                extent.owners += 1
            self.num_slots, self._free = before
            raise
        return extents

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store the packed new keys and values `[kv_heads, T, head_dim]` of a pass where its plan says."""
        layer = self._storage(layer_idx, key, value)
        append(key, value, layer.keys, layer.values, plan, layer.num_kv_heads)

    def copy(
        self,
        source: Extent,
        source_start: int,
        target: Extent,
        target_start: int,
        length: int,
        delta: int = 0,
        rotary: dict[int, RotarySpec | None] | None = None,
    ) -> None:
        """Copy `length` tokens from one extent to another, keys turned by `delta` positions."""
        origin = Place(source.origin, source.capacity, source_start)
        goal = Place(target.origin, target.capacity, target_start)
        for layer_idx, layer in self.layers.items():
            self._grow(layer)
            spec = rotary[layer_idx] if delta and rotary is not None else None
            move(layer.keys, layer.values, origin, goal, length, layer.num_kv_heads, delta, spec)

    def _move(self, sources: Sequence[Run], targets: Sequence[Run]) -> None:
        """Move runs of tokens to others of their lengths, which may lie over them."""
        made: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self.layers.values():
            at = (layer.num_kv_heads, layer.keys.device)
            if at not in made:
                made[at] = _rows(sources, *at), _rows(targets, *at)
            from_rows, to_rows = made[at]
            for storage in (layer.keys, layer.values):
                storage[to_rows] = storage[from_rows]

    @staticmethod
    def _turn(spec: RotarySpec, delta: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return spec.tables(torch.tensor([delta]).numpy(), dtype, like.device)

    def _storage(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerStorage:
        layer = self.layers.get(layer_idx)
        if layer is None:
            heads = key.shape[0]
            with torch.inference_mode(False):  # a kept cache may be written outside of it later
                keys = key.new_zeros(self.num_slots * heads, key.shape[-1])
                values = value.new_zeros(self.num_slots * heads, value.shape[-1])
            layer = self.layers[layer_idx] = LayerStorage(keys, values, heads)
        elif (key.shape[0], key.shape[-1], key.dtype, key.device) != (
            layer.num_kv_heads,
            layer.keys.shape[-1],
            layer.keys.dtype,
            layer.keys.device,
        ):
            raise ValueError(
                f"this cache holds keys of {layer.num_kv_heads} heads x {layer.keys.shape[-1]}, {layer.keys.dtype} on "
                f"{layer.keys.device}; got {key.shape[0]} x {key.shape[-1]} in {key.dtype} on {key.device}: "
                "a cache serves the model that filled it"
            )
        self._grow(layer)
        return layer

    def _grow(self, layer: LayerStorage) -> None:
        """Reallocate a layer's storage if more slots were handed out; unwritten slots are zero, never NaN."""
        rows = self.num_slots * layer.num_kv_heads
        for name in ("keys", "values"):
            old = getattr(layer, name)
            if old.shape[0] < rows:
                with torch.inference_mode(False), torch.no_grad():
                    new = old.new_zeros(max(rows, int(old.shape[0] * GROWTH)), old.shape[-1])
                    new[: old.shape[0]] = old
                setattr(layer, name, new)

    def _take(self, size: int) -> int:
        if size == 0:
            return 0
        for i, (origin, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(origin + size, room - size)] if room > size else []
                return origin
        self.num_slots += size
        return self.num_slots - size

    def _give(self, origin: int, size: int) -> None:
        ranges = sorted([*self._free, (origin, size)])
        self._free = ranges[:1]
        for start, room in ranges[1:]:
            last, length = self._free[-1]
            if last + length == start:
                self._free[-1] = (last, length + room)
            else:
                self._free.append((start, room))
        if sum(self._free[-1]) == self.num_slots:
            self.num_slots = self._free.pop()[0]


def _rows(runs: Sequence[Run], num_kv_heads: int, device: torch.device) -> torch.Tensor:
    """Storage rows of runs of tokens, head by head: int64 `[kv_heads * tokens]`."""
    origin, capacity, first, length = np.array([(e.origin, e.capacity, start, n) for e, start, n in runs]).T
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    heads = np.arange(num_kv_heads)[:, None] * np.repeat(capacity, length)
    rows = heads + np.repeat(origin * num_kv_heads + first, length) + within
    return to_device(rows.reshape(-1), device)
