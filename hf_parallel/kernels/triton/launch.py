"""Launch: the integers of a plan on a device, in buffers that stay where they are.

A launch is loaded with a decode step's plan and serves the steps that follow by one number, `step`, which its kernels
read from the device. It can be loaded with another plan that fits its buffers, so that kernels which a CUDA graph has
captured over them stay right. It belongs to the plans that remember it and to the graphs that were captured over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from hf_parallel.kernels.plan import AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.triton.kernels import advance_kernel
from hf_parallel.kernels.work import ITEM_FIELDS, Cut, Work, make_work

HORIZON = 64
"""Decode steps that shares are cut for. Longer, and they grow unequal; shorter, and the host cuts more often."""

INTERPRETED_PROCESSORS = 1
"""Processors that a CPU has for Triton's interpreter."""

_ALIGNMENT = 32
"""Buffers begin at multiples of 128 bytes: Triton compiles a kernel anew for pointers that are aligned otherwise."""

_PAIRS_AT_ONCE = 16
"""Pairs whose turns one program tabulates. Divides every bucket."""

AnyLaunch = TypeVar("AnyLaunch", bound="Launch")


class LayerShape(NamedTuple):
    """What layers have in common that share a launch."""

    groups: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    rotary: RotarySpec | None


class Tiling(NamedTuple):
    """Shape of an attention kernel: rows and keys of a tile, warps, pipeline stages, programs per processor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int

    def group_tile(self, groups: int) -> int:
        """Heads of a group that a tile takes at a time: all of them, if they fit."""
        return -(-groups // -(-groups // self.block_m))


def select_tilings(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Tiling, ...]:
    """The tilings for a head size, a dtype and a GPU, that of fewest rows first; docs/kernels.md says why these."""
    if dtype == torch.float32:
        return (Tiling(16, 16, 4, 3, 2 if head_dim <= 128 else 1),)
    if head_dim > 128:
        return Tiling(16, 32, 4, 3, 2), Tiling(32, 32, 4, 2, 2)
    if head_dim <= 64:
        return Tiling(16, 64, 4, 3, 3), Tiling(64, 64, 4, 3, 2), Tiling(128, 64, 8, 3, 1)
    if capability < (9, 0):
        return Tiling(16, 64, 4, 3, 2), Tiling(64, 32, 4, 3, 2), Tiling(128, 32, 8, 3, 1)
    return Tiling(16, 64, 4, 3, 3), Tiling(64, 64, 4, 3, 2), Tiling(128, 64, 8, 3, 1)


class Launch(ABC):
    """Buffers of a plan on a device.

    Attributes
    ----------
    buffers : Buffers
    step : int
        Decode steps since the plan that was loaded.
    horizon : int
        Decode steps that a loaded plan serves.
    """

    buffers: Buffers
    step: int
    horizon: int

    def serve(self, plan: AttentionPlan) -> bool:
        """Make the buffers hold `plan`, unless they do; returns whether it fits."""
        step = self._step_of(plan)
        if step is None:
            arrays = self._arrays(plan)
            if arrays is None or not self.buffers.fit(arrays):
                return False
            self._load(plan, arrays)
        elif step != self.step:
            self._advance(step)
        return True

    def following(self, plan: AttentionPlan) -> Launch | None:
        """Itself, if `plan` follows from the one that was loaded and lies within the horizon."""
        return None if self._step_of(plan) is None else self

    def _step_of(self, plan: AttentionPlan) -> int | None:
        """Steps from the loaded plan to `plan`, whose arrays are its own then; None if it does not serve it."""
        if any(mine is not its for mine, its in zip(self._shared, _shared(plan), strict=True)):
            return None
        step = _first_write(plan) - self._first_write
        return step if 0 <= step <= (0 if plan.growth is None else self.horizon) else None

    def _load(self, plan: AttentionPlan, arrays: Mapping[str, np.ndarray]) -> None:
        self.buffers.load(arrays)
        self._shared, self._first_write = _shared(plan), _first_write(plan)
        self._advance(0)

    @abstractmethod
    def _arrays(self, plan: AttentionPlan) -> dict[str, np.ndarray] | None:
        """What the buffers hold for a plan; None if they cannot serve it, however large."""

    @abstractmethod
    def _advance(self, step: int) -> None:
        """Go to a step, which may be an earlier one: a pass may be taken back and taken again."""


def launch_for(plan: AttentionPlan, key: Hashable, make: Callable[[], AnyLaunch]) -> AnyLaunch:
    """The launch that a plan remembers under `key`, holding that plan; a new one where none does."""
    launch = plan.memo(key, make)
    if not launch.serve(plan):
        launch = plan._memo[key] = make()
    return launch


def _shared(plan: AttentionPlan) -> tuple[np.ndarray, ...]:
    """Arrays that a plan shares with the decode steps after it and with no other plan."""
    return plan.pair_query, plan.pair_lo, plan.write_query


def _first_write(plan: AttentionPlan) -> int:
    return int(plan.write_index[0]) if len(plan.write_index) else 0


class WriteLaunch(Launch):
    """Where a plan's new tokens are stored, in layers of any shape."""

    horizon = np.iinfo(np.int32).max

    def __init__(self, plan: AttentionPlan, device: torch.device) -> None:
        arrays = self._arrays(plan)
        self.buffers = Buffers(arrays, device)
        self._load(plan, arrays)

    def _arrays(self, plan: AttentionPlan) -> dict[str, np.ndarray]:
        return {
            "query": plan.write_query,
            "origin": plan.write_origin,
            "capacity": plan.write_capacity,
            "index": plan.write_index,
            "count": np.array([len(plan.write_query)]),
            "step": np.zeros(1),
        }

    def _advance(self, step: int) -> None:
        self.buffers["step"].fill_(step)
        self.step = step


class AttendLaunch(Launch):
    """Shares of a plan's attention for layers of one shape, and the scratch memory of their partial results.

    Parameters
    ----------
    num_tokens : int
        Queries that a pass may have at most. Those beyond the plan's own pad it and see nothing.

    Attributes
    ----------
    tilings : tuple of Tiling
        Of the attention kernels, launched one after another. The lines of the first are in `buffers["lines 0"]`.
    part_out, part_lse : float32 [S, heads, value_dim], [S, heads]
    cos, sin : float32 [P, rotary_dim / 2]
        Turns of the pairs at this step, of those that turn.
    """

    horizon = HORIZON

    def __init__(self, plan: AttentionPlan, shape: LayerShape, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self.tilings = self._needed(plan)
        work = self._work(plan)
        arrays = self._named(plan, work)
        most = {"items": work.most_items * len(ITEM_FIELDS), "merge_slot": work.most_slots}
        self.buffers = Buffers(arrays, shape.device, {**most, "merge_start": num_tokens + 1})
        half = 0 if shape.rotary is None else len(shape.rotary.inv_freq)
        slots, heads = len(self.buffers["merge_slot"]), shape.groups * shape.num_kv_heads
        new = torch.empty(0, dtype=torch.float32, device=shape.device).new_empty
        self.part_out, self.part_lse = new(slots, heads, shape.value_dim), new(slots, heads)
        self.cos, self.sin = new(2, len(self.buffers["pair_query"]), half)
        self._load(plan, arrays)

    @property
    def lines(self) -> list[int]:
        """Per tiling, into how many lines its work may be cut."""
        shape, processors = self.shape, _processors(self.shape.device)
        heads = [shape.num_kv_heads * -(-shape.groups // t.group_tile(shape.groups)) for t in self.tilings]
        return [max(1, t.programs * processors // count) for t, count in zip(self.tilings, heads, strict=True)]

    def _needed(self, plan: AttentionPlan) -> tuple[Tiling, ...]:
        """One tiling for blocks that few rows see, one for those that many do."""
        shape = self.shape
        fewest, *wider = select_tilings(max(shape.head_dim, shape.value_dim), shape.dtype, _capability(shape.device))
        rows = np.diff(plan.block_pairs) * shape.groups
        if not wider or rows.max() <= fewest.block_m:
            return (fewest,)
        wide = next((tiling for tiling in wider if rows.max() <= tiling.block_m), wider[-1])
        return (fewest, wide) if rows.min() <= fewest.block_m else (wide,)

    def _arrays(self, plan: AttentionPlan) -> dict[str, np.ndarray] | None:
        if plan.num_queries > self.num_tokens or not set(self._needed(plan)) <= set(self.tilings):
            return None
        return self._named(plan, self._work(plan))

    def _work(self, plan: AttentionPlan) -> Work:
        groups = self.shape.groups
        cuts = [
            Cut(tiling.block_m // tiling.group_tile(groups), tiling.block_n, lines)
            for tiling, lines in zip(self.tilings, self.lines, strict=True)
        ]
        return make_work(plan, cuts, self.shape.window, 0 if plan.growth is None else self.horizon)

    def _named(self, plan: AttentionPlan, work: Work) -> dict[str, np.ndarray]:
        pairs, growth, none = work.pairs, plan.growth, np.zeros(len(plan.pair_query), np.int64)
        return {
            "items": work.items.reshape(-1),
            **{f"lines {i}": lines for i, lines in enumerate(work.lines)},
            "pair_query": plan.pair_query[pairs],
            "pair_lo": plan.pair_lo[pairs],
            "pair_hi": plan.pair_hi[pairs],
            "pair_reach": plan.pair_reach[pairs],
            "pair_delta": plan.pair_delta[pairs],
            "growth_hi": (none if growth is None else growth.hi)[pairs],
            "growth_reach": (none if growth is None else growth.reach)[pairs],
            "growth_delta": (none if growth is None else growth.delta)[pairs],
            "merge_start": work.merge_start,  # zeros behind it: queries that pad a pass merge nothing
            "merge_slot": work.merge_slot,
            "step": np.zeros(1),
        }

    def _load(self, plan: AttentionPlan, arrays: Mapping[str, np.ndarray]) -> None:
        self._turns = bool(arrays["items"][ITEM_FIELDS.index("turned") :: len(ITEM_FIELDS)].any())
        super()._load(plan, arrays)

    def _advance(self, step: int) -> None:
        rotary = self.shape.rotary
        if rotary is not None and self._turns:
            self._tabulate(rotary, step)
        else:
            self.buffers["step"].fill_(step)
        self.step = step

    def _tabulate(self, rotary: RotarySpec, step: int) -> None:
        with on_device(self.shape.device):
            advance_kernel[(len(self.cos) // _PAIRS_AT_ONCE,)](
                self.buffers["pair_delta"],
                self.buffers["growth_delta"],
                frequencies(rotary, self.shape.device),
                self.cos,
                self.sin,
                self.buffers["step"],
                step,
                HALF=len(rotary.inv_freq),
                BLOCK_H=block_size(len(rotary.inv_freq)),
                BLOCK_P=_PAIRS_AT_ONCE,
            )


class Buffers:
    """Named int32 arrays side by side in one tensor on the device, filled by one copy.

    Parameters
    ----------
    arrays : mapping of str to integer array
        What they hold first.
    room : mapping of str to int
        Entries that some may have at most. Each has some room to grow.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], device: torch.device, room: Mapping[str, int] | None = None
    ) -> None:
        self._slices: dict[str, slice] = {}
        end = 0
        for name, array in arrays.items():
            size = bucket(max(len(array), (room or {}).get(name, 0)))
            self._slices[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._all = torch.zeros(end, dtype=torch.int32, device=device)
        self._views = {name: self._all[place] for name, place in self._slices.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def fit(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether there is room for arrays of these names."""
        return all(len(array) <= len(self._views[name]) for name, array in arrays.items())

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Fill the buffers, zeros behind what is given. The host does not wait for the device."""
        staged = torch.zeros(len(self._all), dtype=torch.int32, pin_memory=self._all.is_cuda)
        host = staged.numpy()
        for name, array in arrays.items():
            start = self._slices[name].start
            host[start : start + len(array)] = array
        self._all.copy_(staged, non_blocking=True)


def bucket(n: int) -> int:
    """Room for `n` entries: the next of 32, 48, 64, 96, 128, ..., so that few sizes occur."""
    power = 1 << max(5, (n - 1).bit_length())
    return power * 3 // 4 if n <= power * 3 // 4 and power > 32 else power


def block_size(dim: int) -> int:
    """Size of a tile's side that holds `dim` elements: a power of two of at least 16, as tensor cores want it."""
    return 1 << max(4, (dim - 1).bit_length())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Where Triton launches what is called inside."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=64)
def frequencies(rotary: RotarySpec, device: torch.device) -> torch.Tensor:
    """Radians per position, float64 `[rotary_dim / 2]`."""
    return torch.tensor(rotary.inv_freq, dtype=torch.float64, device=device)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
