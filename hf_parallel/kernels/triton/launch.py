"""Launch: the integers of a plan in persistent device buffers.

A launch that holds the plan of a decode step serves the following steps too: only `step`, a number that its kernels
read from the device, changes. Another plan that fits the buffers can be loaded into them, so CUDA graphs captured over
them stay valid. A launch is owned by the plans that cache it and by the graphs captured over it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from hf_parallel.kernels.plan import AttentionPlan, DeviceBuffers, Increments
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.storage import FIRST_QUANTIZED
from hf_parallel.kernels.triton.kernels import advance_kernel
from hf_parallel.kernels.work import ITEM_FIELDS, Partition, Work, make_work

HORIZON = 64  # decode steps for which work items are made. More: programs' work becomes unequal; fewer: more CPU work
_ALIGNMENT = 32  # of buffers, in int32: Triton compiles a kernel again for pointers of another alignment
PAIRS_PER_PROGRAM = 16  # pairs for which one program computes rotation tables; divides every size of `bucket`

AnyLaunch = TypeVar("AnyLaunch", bound="Launch")


class LayerShape(NamedTuple):
    """Properties shared by all layers that use one launch."""

    groups: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    rotary: RotarySpec | None
    lead: int = 0  # dimensions of the keys that are stored beside latents of `head_dim`
    chunk: int | None = None


class Tiling(NamedTuple):
    """Configuration of the attention kernel: rows and keys per tile, warps, stages, programs per processor.

    Blocks in 8 bits (`quantized`) have launches of their own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    quantized: bool = False

    def for_quantized(self) -> Tiling:
        """Return the tiling for blocks in 8 bits, whose conversion takes registers: with these, none is spilled."""
        stages = self.num_stages if self.block_n < self.block_m else min(self.num_stages, 2)
        return self._replace(num_stages=stages, programs=min(self.programs, 2), quantized=True)

    def group_tile(self, groups: int) -> int:
        """Return the number of heads of a group that a tile holds: all of them, if they fit."""
        return -(-groups // -(-groups // self.block_m))


def select_tilings(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Tiling, ...]:
    """Return the tilings for a head size, a dtype and a GPU, in ascending order of rows (see docs/kernels.md)."""
    if dtype == torch.float32 and head_dim > 256:
        return (Tiling(16, 16, 8, 1, 1),)
    if dtype == torch.float32:
        programs = 2 if head_dim <= 128 else 1
        return (Tiling(16, 16, 4, 3, programs),)
    if head_dim > 256 and capability < (9, 0):
        return (Tiling(16, 32, 8, 2, 1),)
    if head_dim > 256:
        return Tiling(16, 32, 8, 2, 1), Tiling(32, 32, 8, 1, 1)
    if head_dim > 128:
        return Tiling(16, 32, 4, 3, 2), Tiling(32, 32, 4, 2, 2)
    if head_dim > 64 and capability < (9, 0):
        return Tiling(16, 64, 4, 3, 2), Tiling(64, 32, 4, 3, 2), Tiling(128, 32, 8, 3, 1)
    return Tiling(16, 64, 4, 3, 3), Tiling(64, 64, 4, 3, 2), Tiling(128, 64, 8, 3, 1)


class Launch(DeviceBuffers):
    """Buffers of a plan on a device."""

    buffers: Buffers
    step: int  # decode steps since the loaded plan
    horizon: int  # decode steps that a loaded plan serves

    def update(self, plan: AttentionPlan) -> bool:
        """See `DeviceBuffers.update`."""
        step = self._step_of(plan)
        if step is None:
            arrays = self._arrays(plan)
            if arrays is None or not self.buffers.fit(arrays):
                return False
            self._load(plan, arrays)
        elif step != self.step:
            self._advance(step)
        return True

    def next_step(self, plan: AttentionPlan) -> Launch | None:
        """See `Derived.next_step`."""
        return None if self._step_of(plan) is None else self

    def _step_of(self, plan: AttentionPlan) -> int | None:
        """Number of steps from the loaded plan to `plan`; None if `plan` does not follow from it."""
        step = plan.step - self._loaded_step
        return step if plan.lineage is self._lineage and 0 <= step <= self.horizon else None

    def _load(self, plan: AttentionPlan, arrays: Mapping[str, np.ndarray]) -> None:
        self.buffers.load(arrays)
        self._lineage = plan.lineage
        self._loaded_step = plan.step
        self._advance(0)

    @abstractmethod
    def _arrays(self, plan: AttentionPlan) -> dict[str, np.ndarray] | None:
        """Contents of the buffers for a plan; None if the launch cannot serve it, whatever its buffers' sizes."""

    @abstractmethod
    def _advance(self, step: int) -> None:
        """Go to a step, which may be an earlier one: a pass may be rolled back and repeated."""


def launch_for(plan: AttentionPlan, key: Hashable, make: Callable[[], AnyLaunch]) -> AnyLaunch:
    """Return the launch cached under `key`, updated to the plan; if the plan does not fit, replace the launch."""
    launch: AnyLaunch | None = plan.derived.get(key)
    if launch is None:
        launch = plan.cached(key, make)
    if not launch.update(plan):
        launch = make()
        plan.derived[key] = launch
    return launch


class WriteLaunch(Launch):
    """Locations at which a plan's new tokens are stored, for layers of any shape."""

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
    """Work items of a plan's attention for layers of one shape, and scratch memory for their partial results.

    A pass has at most `max_tokens` queries; those after the plan's own are padding without visible keys. `calls` are
    the launches of the attention kernel, one per tiling. It writes `part_out` and `part_lse`: float32 `[S, heads,
    value_dim]` and `[S, heads]`. `cos` and `sin`, float32 `[P, rotary_dim / 2]`, rotate the pairs at this step.
    """

    horizon = HORIZON

    def __init__(self, plan: AttentionPlan, shape: LayerShape, max_tokens: int) -> None:
        self.shape = shape
        self.max_tokens = max_tokens
        self._tilings = self._select(plan)
        work = self._work(plan)
        arrays = self._named(plan, work)
        sizes = {"items": work.max_items * len(ITEM_FIELDS), "merge_slot": work.max_slots}
        self.buffers = Buffers(arrays, shape.device, **sizes, merge_start=max_tokens + 1)
        half = 0 if shape.rotary is None else len(shape.rotary.inv_freq)
        slots = len(self.buffers["merge_slot"])
        num_heads = shape.groups * shape.num_kv_heads
        new = torch.empty(0, dtype=torch.float32, device=shape.device).new_empty
        self.part_out = new(slots, num_heads, shape.value_dim)
        self.part_lse = new(slots, num_heads)
        self.cos, self.sin = new(2, len(self.buffers["pair_query"]), half)
        self.calls = [self._call(number, tiling) for number, tiling in enumerate(self._tilings)]
        self._load(plan, arrays)

    def _call(self, number: int, tiling: Tiling) -> tuple[tuple[int], tuple[torch.Tensor, ...], dict[str, int | str]]:
        """Grid, tensors and constants of a launch of the attention kernel, the same for all layers."""
        shape = self.shape
        starts = ("block_start", "start_increment")
        names = ["pair_query", "pair_lo", "pair_hi", "pair_position", "hi_increment", "position_increment"]
        names += starts if shape.chunk else names[:2]
        buffers = [self.buffers[name] for name in ("items", f"item_offsets {number}", *names)]
        constants: dict[str, int | str] = {
            "CHUNKED": shape.chunk is not None,
            **dim_constants(shape.head_dim, shape.value_dim),
            "LEAD": shape.lead,
            "BLOCK_L": block_size(shape.lead),
            "GROUPS": shape.groups,
            "GROUP_TILE": tiling.group_tile(shape.groups),
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "HALF": self.cos.shape[-1],
            "INTERLEAVED": shape.rotary is not None and shape.rotary.interleaved,
            "QUANTIZED": tiling.quantized,
            "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }
        grid = (self._max_programs(tiling) * self._head_tiles(tiling),)
        tensors = (*buffers, self.cos, self.sin, self.buffers["step"], self.part_out, self.part_lse)
        return grid, tensors, constants

    def _head_tiles(self, tiling: Tiling) -> int:
        groups = self.shape.groups
        tiles_per_group = -(-groups // tiling.group_tile(groups))
        return self.shape.num_kv_heads * tiles_per_group

    def _max_programs(self, tiling: Tiling) -> int:
        num_programs = tiling.programs * num_processors(self.shape.device)
        return max(1, num_programs // self._head_tiles(tiling))

    def _select(self, plan: AttentionPlan) -> tuple[Tiling, ...]:
        """Select the tilings for blocks in the dtype of the queries, and for blocks in 8 bits."""
        rows = np.diff(plan.block_pairs) * self.shape.groups
        keys = np.maximum.reduceat(plan.pair_hi, plan.block_pairs[:-1])
        quantized = plan.block_origin >= FIRST_QUANTIZED
        if not quantized.any():
            return self._select_for(rows, keys)
        tilings: list[Tiling] = []
        if not quantized.all():
            tilings += self._select_for(rows[~quantized], keys[~quantized])
        for tiling in self._select_for(rows[quantized], keys[quantized]):
            tilings.append(tiling.for_quantized())
        return tuple(tilings)

    def _select_for(self, rows: np.ndarray, keys: np.ndarray) -> tuple[Tiling, ...]:
        """Select one tiling for blocks with few rows and one for blocks with many, or one for all if that is faster.

        A second launch takes longer than reading some keys again for more tiles of few rows, or than computing a few
        blocks of few rows in tiles for many.
        """
        shape = self.shape
        dim = max(shape.head_dim, shape.value_dim)
        smallest, *wider = select_tilings(dim, shape.dtype, _capability(shape.device))
        if not wider or rows.max() <= smallest.block_m:
            return (smallest,)
        steps = -(-keys // smallest.block_n)
        repeats = (rows - 1) // smallest.block_m  # times that keys are read again
        if (steps * repeats).sum() <= self._max_programs(smallest):
            return (smallest,)
        wide = next((tiling for tiling in wider if rows.max() <= tiling.block_m), wider[-1])
        num_small = (rows <= smallest.block_m).sum()
        if num_small <= self._max_programs(wide):
            return (wide,)
        return smallest, wide

    def _arrays(self, plan: AttentionPlan) -> dict[str, np.ndarray] | None:
        if plan.num_queries > self.max_tokens:
            return None
        if not set(self._select(plan)) <= set(self._tilings):
            return None
        return self._named(plan, self._work(plan))

    def _work(self, plan: AttentionPlan) -> Work:
        groups = self.shape.groups
        partitions = []
        for tiling in self._tilings:
            pairs_per_tile = tiling.block_m // tiling.group_tile(groups)
            max_programs = self._max_programs(tiling)
            partitions.append(Partition(pairs_per_tile, tiling.block_n, max_programs, tiling.quantized))
        horizon = 0 if plan.increments is None else self.horizon
        return make_work(plan, partitions, self.shape.window, self.shape.chunk, horizon)

    def _named(self, plan: AttentionPlan, work: Work) -> dict[str, np.ndarray]:
        pairs = work.pairs
        zeros = np.zeros(len(plan.pair_query), np.int64)
        step = plan.increments or Increments(zeros, zeros, zeros)
        arrays = {
            "items": work.items.reshape(-1),
            "pair_query": plan.pair_query[pairs],
            "pair_lo": plan.pair_lo[pairs],
            "pair_hi": plan.pair_hi[pairs],
            "pair_position": plan.pair_position[pairs],
            "pair_delta": plan.pair_delta[pairs],
            "hi_increment": step.hi[pairs],
            "position_increment": step.position[pairs],
            "delta_increment": step.delta[pairs],
            "merge_start": work.merge_start,  # followed by zeros: padded queries have no partial results
            "merge_slot": work.merge_slot,
            "step": np.zeros(1),
        }
        for number, offsets in enumerate(work.item_offsets):
            arrays[f"item_offsets {number}"] = offsets
        if self.shape.chunk is not None:
            start = plan.block_start(plan.pair_position)
            next_start = plan.block_start(plan.pair_position + step.position)
            arrays["block_start"] = start[pairs]
            arrays["start_increment"] = (next_start - start)[pairs]
        return arrays

    def _load(self, plan: AttentionPlan, arrays: Mapping[str, np.ndarray]) -> None:
        items = arrays["items"].reshape(-1, len(ITEM_FIELDS))
        self._rotates = bool(items[:, ITEM_FIELDS.index("rotated")].any())
        super()._load(plan, arrays)

    def _advance(self, step: int) -> None:
        rotary = self.shape.rotary
        buffers = self.buffers
        half = self.cos.shape[-1]
        if rotary is None or not self._rotates:
            buffers["step"].fill_(step)
        else:
            inv_freq = frequencies(rotary, self.shape.device)
            deltas = buffers["pair_delta"], buffers["delta_increment"]
            with on_device(self.shape.device):
                advance_kernel[(len(self.cos) // PAIRS_PER_PROGRAM,)](
                    *deltas, inv_freq, self.cos, self.sin, buffers["step"], step,
                    HALF=half, BLOCK_H=block_size(half), BLOCK_P=PAIRS_PER_PROGRAM,
                )  # fmt: skip
        self.step = step


class Buffers:
    """Named int32 arrays in one device tensor, filled by one copy. `sizes` reserves more; all sizes are rounded up."""

    def __init__(self, arrays: Mapping[str, np.ndarray], device: torch.device, **sizes: int) -> None:
        capacities: list[int] = []
        for name, array in arrays.items():
            size = max(len(array), sizes.get(name, 0))
            capacities.append(bucket(size))
        aligned = [-(-capacity // _ALIGNMENT) * _ALIGNMENT for capacity in capacities]
        self._all = torch.zeros(sum(aligned), dtype=torch.int32, device=device)
        self._views: dict[str, torch.Tensor] = {}
        for name, capacity, part in zip(arrays, capacities, self._all.split(aligned), strict=True):
            self._views[name] = part[:capacity]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def fit(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether the buffers are large enough for arrays of these names."""
        return all(len(array) <= len(self._views[name]) for name, array in arrays.items())

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Fill the buffers, padded with zeros, without waiting for the device."""
        staged = torch.zeros(len(self._all), dtype=torch.int32, pin_memory=self._all.is_cuda)
        host = staged.numpy()
        for name, array in arrays.items():
            start = self._views[name].storage_offset()
            host[start : start + len(array)] = array
        self._all.copy_(staged, non_blocking=True)


def bucket(n: int) -> int:
    """Round up to 32, 48, 64, 96, 128, ..., so that few sizes occur."""
    power = 1 << max(5, (n - 1).bit_length())
    three_quarters = power * 3 // 4
    if power > 32 and n <= three_quarters:
        return three_quarters
    return power


def block_size(dim: int) -> int:
    """Round up to a power of two of at least 16, as tensor cores need it."""
    return 1 << max(4, (dim - 1).bit_length())


def dim_constants(dim: int, value_dim: int) -> dict[str, int]:
    """Return the head sizes of a layer and their padded sizes, as arguments of a kernel."""
    return {"DIM": dim, "DIM_V": value_dim, "BLOCK_D": block_size(dim), "BLOCK_V": block_size(value_dim)}


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch Triton kernels on `device` inside the context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that begins at a multiple of 16 bytes: `x`, or a copy of it.

    Triton compiles a kernel again for tensors that begin elsewhere.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@lru_cache(maxsize=64)
def frequencies(rotary: RotarySpec, device: torch.device) -> torch.Tensor:
    """Return the radians per position, float64 `[rotary_dim / 2]`."""
    return torch.tensor(rotary.inv_freq, dtype=torch.float64, device=device)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@lru_cache
def num_processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 1 for Triton's interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
