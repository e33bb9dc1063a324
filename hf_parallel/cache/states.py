"""StateArena: storage for layers that keep a state instead of keys, such as linear attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_parallel.kernels import to_device
from hf_parallel.kernels.storage import with_rows

GROWTH = 1.5
"""Minimum growth factor of the storage, as of an arena's."""

Slots = slice | torch.Tensor
"""Slots of rows, int64 `[rows]`; a slice if they are consecutive."""


class StateArena:
    """States by slot. A layer's storage `[slots, ...]` is allocated at its first write, and grows.

    `in_use`: whether the model that fills the cache has layers that keep states. `stepwise`: whether these continue
    from a state by one token at a time only. Under a budget of `max_slots`, check `free_slots` before allocating.
    """

    max_slots: int | None = None

    def __init__(self) -> None:
        self.in_use = False
        self.stepwise = False
        self.clear()

    def clear(self) -> None:
        """Release all memory."""
        self.num_slots = 0
        self.storage: dict[tuple[str, str, int], torch.Tensor] = {}  # by module, kind of state and `state_idx`
        self._free: list[int] = []  # ascending

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state, over all layers written so far."""
        num_bytes = 0
        for storage in list(self.storage.values()):
            num_bytes += math.prod(storage.shape[1:]) * storage.element_size()
        return num_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of storage held, used or not."""
        return sum(storage.nbytes for storage in list(self.storage.values()))

    @property
    def num_used(self) -> int:
        """Number of states held."""
        return self.num_slots - len(self._free)

    @property
    def free_slots(self) -> float:
        """Number of slots of the budget that are not allocated."""
        return math.inf if self.max_slots is None else self.max_slots - self.num_used

    def allocate(self, count: int) -> list[int]:
        """Return free slots, consecutive ones if there are."""
        if not count:
            return []
        for first in range(len(self._free) - count + 1):
            slots = self._free[first : first + count]
            if slots[-1] - slots[0] == count - 1:
                del self._free[first : first + count]
                return slots
        taken = self._free[:count]
        self._free = self._free[count:]
        new = range(self.num_slots, self.num_slots + count - len(taken))
        self.num_slots += len(new)
        return [*taken, *new]

    def release(self, slot: int) -> None:
        """Free a slot. Free slots at the end are removed."""
        self._free = sorted([*self._free, slot])
        while self._free and self._free[-1] == self.num_slots - 1:
            self.num_slots = self._free.pop()

    def grow(self) -> None:
        """Grow all storage to `num_slots`, so that a lack of memory is detected before any state is written."""
        for storage in self.storage.values():
            if len(storage) < self.num_slots:
                slots = int(len(storage) * GROWTH)
                if self.max_slots is not None:
                    slots = min(slots, self.max_slots)
                self._resize(max(self.num_slots, slots))
                return

    def limit(self, max_slots: int) -> None:
        """Set the budget, of at least `num_slots`, and release memory beyond it."""
        self.max_slots = max_slots
        if any(len(storage) > max_slots for storage in self.storage.values()):
            self._resize(self.num_slots)

    def _resize(self, slots: int) -> None:
        for key, storage in self.storage.items():
            self.storage[key] = with_rows(storage, slots)

    def defragment(self, used: Sequence[int]) -> dict[int, int]:
        """Move the states in slots `used` to the first slots. Return the new slot of each that moved, by the old."""
        holes = sorted(set(range(len(used))) - set(used))
        beyond = [slot for slot in used if slot >= len(used)]
        if beyond:
            for storage in self.storage.values():
                sources = to_device(beyond, storage.device)
                storage[to_device(holes, storage.device)] = storage[sources]
        self.num_slots = len(used)
        self._free = []
        return dict(zip(beyond, holes, strict=True))

    def read(self, module: str, slots: Slots, in_place: bool) -> dict[str, dict[int, torch.Tensor]]:
        """Return the states `[rows, ...]` of a module by kind and `state_idx`; copies, or `in_place` the storage."""
        states: dict[str, dict[int, torch.Tensor]] = {"conv": {}, "recurrent": {}}
        is_slice = isinstance(slots, slice)
        for (name, kind, state_idx), storage in self.storage.items():
            if name != module:
                continue
            rows = storage[on_device(slots, storage.device)]
            if is_slice and not in_place:  # a view of the storage
                rows = rows.clone()
            states[kind][state_idx] = rows
        return states

    def write(self, module: str, kind: str, state_idx: int, states: torch.Tensor, slots: Slots) -> None:
        """Store the states `[rows, ...]` of a module."""
        key = module, kind, state_idx
        storage = self.storage.get(key)
        if storage is None:
            with torch.inference_mode(False):  # the cache may later be written outside of inference mode
                storage = states.new_zeros(self.num_slots, *states.shape[1:])
            self.storage[key] = storage
        if storage.shape[1:] != states.shape[1:]:
            raise ValueError(
                f"this cache holds states {tuple(storage.shape[1:])} of {module}, got {tuple(states.shape[1:])}: a "
                "cache serves the model that filled it"
            )
        index = on_device(slots, storage.device)
        if isinstance(index, torch.Tensor):
            storage.index_copy_(0, index, states.to(storage.dtype))
        elif states.data_ptr() != storage[index].data_ptr():
            storage[index] = states

    def copy(self, source: int, target: int) -> None:
        """Copy a state to another slot."""
        self.grow()
        for storage in self.storage.values():
            storage[target] = storage[source]

    def are_finite(self, slots: Sequence[int]) -> torch.Tensor:
        """Return whether all numbers of the states in some slots are finite: bool `[slots]`, on the CPU."""
        finite = torch.ones(len(slots), dtype=torch.bool)
        for storage in self.storage.values():
            states = storage[to_device(slots, storage.device)].flatten(1)
            finite &= states.isfinite().all(dim=1).cpu()
        return finite


def on_device(slots: Slots, device: torch.device) -> Slots:
    """Return slots on the device of a layer."""
    return slots.to(device) if isinstance(slots, torch.Tensor) else slots
