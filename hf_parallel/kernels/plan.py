"""AttentionPlan: the integers that describe one forward pass of block attention.

It is made once per pass, outside the layers, and every layer reads it. Nothing here depends on a model's
dimensions: an extent is addressed in token slots, and a layer multiplies by its own heads and head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from hf_parallel.kernels.transfer import to_device

T = TypeVar("T")


class Memo:
    """Remembers what is derived from it: set-up is paid once per pass, not once per layer."""

    _memo: dict[Hashable, Any]

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make()` gave the first time that `key` was asked for."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]


@runtime_checkable
class Following(Protocol):
    """What is derived from a decode step's plan and knows how to go on to the next step."""

    def following(self, plan: AttentionPlan) -> Any:
        """The same of the next step's `plan`, or None if it must be made anew."""


@runtime_checkable
class PlanOnDevice(Protocol):
    """A plan as a device has it: buffers that kernels read, to which other plans of the same shape can be written."""

    def serve(self, plan: AttentionPlan) -> bool:
        """Make the buffers hold `plan`, unless they do; returns whether it fits."""


@dataclass(frozen=True, eq=False)
class Growth:
    """What a decode step adds to the numbers of its plan, if the same rows then bring one more token each.

    All positions in a step are sums of lengths, and a length grows by one or not at all: from one step to the next a
    plan changes by the same integers, which are known when its first step is.

    Attributes
    ----------
    delta, reach, hi : int64 [P]
        Added to `pair_delta`, `pair_reach` and `pair_hi`. Every `write_index` grows by one.
    lo : int64 [P], optional
        Added to `pair_lo` by the next step alone: a sliding window may reach a block later. None: no window.
    """

    delta: np.ndarray
    reach: np.ndarray
    hi: np.ndarray
    lo: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Narrowed:
    """A plan under a sliding window, None where the window cuts nothing off it."""

    window: int
    plan: AttentionPlan | None

    def following(self, plan: AttentionPlan) -> Narrowed:
        """The same of the next step's `plan`."""
        narrowed = plan.narrowed(self.window)
        if narrowed is not None and self.plan is not None:
            narrowed.go_on_from(self.plan)
        return Narrowed(self.window, narrowed)


@dataclass(frozen=True, eq=False)
class AttentionPlan(Memo):
    """Which packed query meets which block, how far it is turned, and which of its keys it may see.

    A layer keeps its keys (and likewise its values) in one tensor of shape `[slots * kv_heads, head_dim]`. A block's
    extent starts at slot `block_origin` and is a contiguous `[kv_heads, block_capacity, head_dim]`; the block's own
    token `j` lies at row `block_first + j` of it. Extents of several blocks may be one and the same memory.

    All arrays are NumPy `int64` on the host. *Pairs* are the (query, block) meetings, sorted by block: those of block
    `b` are `block_pairs[b] : block_pairs[b + 1]`.

    Attributes
    ----------
    num_queries : int
        T, packed new tokens of all rows.
    block_origin, block_capacity, block_first : [B]
        Where each block lies, in token slots.
    block_pairs : [B + 1]
        Offsets into the pair arrays.
    pair_query : [P]
        Index of the packed query.
    pair_delta : [P]
        Positions by which the query is turned before it meets the block (DESIGN.md section 2).
    pair_reach : [P]
        Index, in the block's own coordinates, at which the query truly stands: `p - start`.
    pair_lo, pair_hi : [P]
        The query sees keys `lo <= j < hi` of the block.
    write_query : [W]
        The packed tokens whose keys and values are stored (all of them, except re-read ones).
    write_origin, write_capacity, write_index : [W]
        Where they go: row `write_index` of the extent at `write_origin`.
    growth : Growth, optional
        How the plan goes on, where each row brings one token of its own.
    """

    num_queries: int
    block_origin: np.ndarray
    block_capacity: np.ndarray
    block_first: np.ndarray
    block_pairs: np.ndarray
    pair_query: np.ndarray
    pair_delta: np.ndarray
    pair_reach: np.ndarray
    pair_lo: np.ndarray
    pair_hi: np.ndarray
    write_query: np.ndarray
    write_origin: np.ndarray
    write_capacity: np.ndarray
    write_index: np.ndarray
    growth: Growth | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def num_blocks(self) -> int:
        """Number of blocks B that are read in this pass."""
        return len(self.block_origin)

    def next_step(self) -> AttentionPlan:
        """Return the plan of the next decode step over the same blocks, by its `growth`.

        What is remembered and has a method `following(plan)` goes on too, unless that gives None.
        """
        assert self.growth is not None, "only a decode step goes on by itself"
        assert self.growth.lo is None, "under a window it goes on with the plan that was narrowed"
        plan = replace(
            self,
            pair_delta=self.pair_delta + self.growth.delta,
            pair_reach=self.pair_reach + self.growth.reach,
            pair_hi=self.pair_hi + self.growth.hi,
            write_index=self.write_index + 1,
            _memo={},
        )
        plan.go_on_from(self)
        return plan

    def go_on_from(self, before: AttentionPlan) -> None:
        """Remember what the plan of the step before does, as far as it goes on."""
        for key, known in before._memo.items():
            if isinstance(known, Following) and (next_known := known.following(self)) is not None:
                self._memo[key] = next_known

    @property
    def on_device(self) -> tuple[PlanOnDevice, ...]:
        """Buffers that were filled for this plan so far."""
        return tuple(known for known in self._memo.values() if isinstance(known, PlanOnDevice))

    @property
    def rotates(self) -> bool:
        """Whether any query must be turned before it meets a block."""
        return self.memo("rotates", lambda: bool(self.pair_delta.any()))

    def windowed(self, window: int | None) -> AttentionPlan:
        """Return the plan in which a query sees only the last `window` positions, itself included (None: all)."""
        if window is None:
            return self
        narrowed = self.memo(("window", window), lambda: Narrowed(window, self.narrowed(window))).plan
        return self if narrowed is None else narrowed

    def narrowed(self, window: int) -> AttentionPlan | None:
        """Make the plan under a sliding window, or None if the window cuts nothing off."""
        lo = np.maximum(self.pair_lo, self.pair_reach - window + 1)
        if np.array_equal(lo, self.pair_lo):
            return None
        growth = self.growth
        if growth is not None:
            next_lo = np.maximum(self.pair_lo, self.pair_reach + growth.reach - window + 1)
            growth = replace(growth, lo=next_lo - lo)
        return replace(self, pair_lo=lo, growth=growth, _memo={})

    def write_view(self, num_kv_heads: int) -> tuple[int, int, int] | None:
        """First row, and strides in rows from token to token and head to head, if the new tokens lie evenly.

        True of a prefill and of a decode step over blocks that were made together. None: see `write_rows`.
        """

        def make() -> tuple[int, int, int] | None:
            rows = self.write_origin * num_kv_heads + self.write_index
            if not len(rows) or (self.write_capacity != self.write_capacity[0]).any():
                return None
            steps = np.diff(rows)
            if len(steps) and (steps[0] < 1 or (steps != steps[0]).any()):
                return None
            return int(rows[0]), int(steps[0]) if len(steps) else 1, int(self.write_capacity[0])

        return self.memo(("write_view", num_kv_heads), make)

    def write_rows(self, num_kv_heads: int, device: torch.device) -> torch.Tensor:
        """Rows of a layer's `[slots * kv_heads, head_dim]` storage that take the new tokens.

        Returns
        -------
        torch.Tensor
            `int64 [kv_heads * W]` on `device`, head-major.
        """

        def make() -> torch.Tensor:
            heads = np.arange(num_kv_heads, dtype=np.int64)[:, None]
            rows = self.write_origin * num_kv_heads + heads * self.write_capacity + self.write_index
            return to_device(rows.reshape(-1), device)

        return self.memo(("write_rows", num_kv_heads, device), make)
