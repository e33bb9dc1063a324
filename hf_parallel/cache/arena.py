"""The arena: where keys and values lie. One flat storage per layer, cut into extents that are never interleaved.

An extent is a contiguous `[kv_heads, capacity, head_dim]` in every layer at the same slot, so that one integer says
where a block is, whatever the layer's dimensions. The arena knows slots and bytes; it knows no block and no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels import AttentionPlan, RotarySpec, rotate

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


class Arena:
    """Hands out extents and moves what is in them.

    Storage of a layer appears with its first write, when its dimensions, dtype and device are known, and grows by
    reallocation when more slots have been handed out than it has; extents keep their slots for life.
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
        return self.num_slots * self.bytes_per_token

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

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store the packed new keys and values `[kv_heads, T, head_dim]` of a pass where its plan says."""
        layer = self._storage(layer_idx, key, value)
        if len(plan.write_query) != plan.num_queries:
            kept = plan.memo(("kept", key.device), lambda: torch.from_numpy(plan.write_query).to(key.device))
            key, value = key.index_select(1, kept), value.index_select(1, kept)
        evenly = plan.write_view(layer.num_kv_heads)
        for storage, new in ((layer.keys, key), (layer.values, value)):
            dim = new.shape[-1]
            if evenly is not None:
                first, token_stride, head_stride = (rows * dim for rows in evenly)
                storage.as_strided(new.shape, (head_stride, token_stride, 1), first).copy_(new)
            else:
                storage.index_copy_(0, plan.write_rows(layer.num_kv_heads, key.device), new.reshape(-1, dim))

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
        tables: dict[tuple[RotarySpec, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        for layer_idx, layer in self.layers.items():
            self._grow(layer)
            from_rows = layer.rows(source, source_start, source_start + length).reshape(-1)
            to_rows = layer.rows(target, target_start, target_start + length).reshape(-1)
            keys = layer.keys[from_rows]
            spec = rotary[layer_idx] if delta and rotary is not None else None
            if spec is not None:
                at = (spec, keys.device)
                if at not in tables:
                    tables[at] = self._turn(spec, delta, keys)
                keys = rotate(keys, *tables[at], spec)
            layer.keys[to_rows] = keys
            layer.values[to_rows] = layer.values[from_rows]

    @staticmethod
    def _turn(spec: RotarySpec, delta: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return spec.tables(torch.tensor([delta]).numpy(), dtype, like.device)

    def _storage(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerStorage:
        layer = self.layers.get(layer_idx)
        if layer is None:
            heads = key.shape[0]
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
                new = old.new_zeros(rows, old.shape[-1])
                new[: old.shape[0]] = old
                setattr(layer, name, new)

    def _take(self, size: int) -> int:
        if size == 0:
            return 0
        for i, (origin, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(origin + size, room - size)] if room > size else []
                return origin
        origin = self.num_slots
        if self._free and sum(self._free[-1]) == self.num_slots:  # the last free range reaches the end
            origin = self._free.pop()[0]
        end = origin + size
        if self.layers:
            end = max(end, int(self.num_slots * GROWTH))
        if end > origin + size:
            self._free.append((origin + size, end - origin - size))
        self.num_slots = end
        return origin

    def _give(self, origin: int, size: int) -> None:
        ranges = sorted([*self._free, (origin, size)])
        self._free = ranges[:1]
        for start, room in ranges[1:]:
            last, length = self._free[-1]
            if last + length == start:
                self._free[-1] = (last, length + room)
            else:
                self._free.append((start, room))
