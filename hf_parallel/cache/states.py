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
        self.in_use = self.stepwise = False
        self.clear()

    def clear(self) -> None:
        """Release all memory."""
        self.num_slots = 0
        self.storage: dict[tuple[str, str, int], torch.Tensor] = {}  # by module, kind of state and `state_idx`
        self._free: list[int] = []  # ascending

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state, over all layers written so far."""
        return sum(math.prod(held.shape[1:]) * held.element_size() for held in list(self.storage.values()))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of storage held, used or not."""
        return sum(held.nbytes for held in list(self.storage.values()))

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
        for first in range(len(self._free) - count + 1 if count else 0):
            if self._free[first + count - 1] - self._free[first] == count - 1:
                return [self._free.pop(first) for _ in range(count)]
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
        for held in self.storage.values():
            if len(held) < self.num_slots:
                slots = int(len(held) * GROWTH)
                self._resize(max(self.num_slots, slots if self.max_slots is None else min(slots, self.max_slots)))
                return

    def limit(self, max_slots: int) -> None:
        """Set the budget, of at least `num_slots`, and release memory beyond it."""
        self.max_slots = max_slots
        if any(len(held) > max_slots for held in self.storage.values()):
            self._resize(self.num_slots)

    def _resize(self, slots: int) -> None:
        for key, held in self.storage.items():
            self.storage[key] = with_rows(held, slots)

    def defragment(self, used: Sequence[int]) -> dict[int, int]:
        """Move the states in slots `used` to the first slots. Return the new slot of each that moved, by the old."""
        holes = sorted(set(range(len(used))) - set(used))
        moved = dict(zip([slot for slot in used if slot >= len(used)], holes, strict=True))
        for held in self.storage.values() if moved else ():
            held[to_device(holes, held.device)] = held[to_device([*moved], held.device)]
        self.num_slots = len(used)
        self._free = []
        return moved

    def read(self, module: str, slots: Slots, in_place: bool) -> dict[str, dict[int, torch.Tensor]]:
        """Return the states `[rows, ...]` of a module by kind and `state_idx`; copies, or `in_place` the storage."""
        found: dict[str, dict[int, torch.Tensor]] = {"conv": {}, "recurrent": {}}
        for (name, kind, state_idx), held in self.storage.items():
            if name == module:
                states = held[on_device(slots, held.device)]
                is_view = isinstance(slots, slice) and not in_place
                found[kind][state_idx] = states.clone() if is_view else states
        return found

    def write(self, module: str, kind: str, state_idx: int, states: torch.Tensor, slots: Slots) -> None:
        """Store the states `[rows, ...]` of a module."""
        key = module, kind, state_idx
        held = self.storage.get(key)
        if held is None:
            with torch.inference_mode(False):  # the cache may later be written outside of inference mode
                held = self.storage[key] = states.new_zeros(self.num_slots, *states.shape[1:])
        if held.shape[1:] != states.shape[1:]:
            raise ValueError(
                f"this cache holds states {tuple(held.shape[1:])} of {module}, got {tuple(states.shape[1:])}: a cache "
                "serves the model that filled it"
            )
        place = on_device(slots, held.device)
        if isinstance(place, torch.Tensor):
            held.index_copy_(0, place, states.to(held.dtype))
        elif states.data_ptr() != held[place].data_ptr():
            held[place] = states

    def copy(self, source: int, target: int) -> None:
        """Copy a state to another slot."""
        self.grow()
        for held in self.storage.values():
            held[target] = held[source]

    def are_finite(self, slots: Sequence[int]) -> torch.Tensor:
        """Return whether all numbers of the states in some slots are finite: bool `[slots]`, on the CPU."""
        finite = torch.ones(len(slots), dtype=torch.bool)
        for held in self.storage.values():
            states = held[to_device(slots, held.device)].flatten(1)
            finite &= states.isfinite().all(dim=1).cpu()
        return finite


def on_device(slots: Slots, device: torch.device) -> Slots:
    """Return slots on the device of a layer."""
    return slots.to(device) if isinstance(slots, torch.Tensor) else slots
