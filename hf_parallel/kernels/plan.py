"""AttentionPlan: the integers that describe one forward pass of block attention. AttentionParams: a layer's settings.

A plan is made once per pass, outside the layers, and read by every layer. It is independent of the model's dimensions:
extents are addressed in token slots, and each layer multiplies by its own number of heads and head size.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hf_parallel.kernels.rope import RotarySpec

T = TypeVar("T")


class LatentHeads(NamedTuple):
    """The heads of latent attention (MLA, DeepSeek-V2, section 2.1), which a layer expands from one latent per token.

    Such a layer stores two tensors of one KV head: `keys` hold latents `[slots, rank]`, and `values` the rotated part
    of the keys, `[slots, rotary_dim]`, which all heads share. Queries begin with their rotated part.
    """

    weight: torch.Tensor
    """`[heads, key_dim + value_dim, rank]`. Maps a latent to the rest of each head's key, then to its value."""
    key_dim: int
    expands: bool = True
    """Whether long passes may expand latents to keys and values, which is faster, but has other last bits."""

    @property
    def keys(self) -> torch.Tensor:
        """`[heads, key_dim, rank]`."""
        return self.weight[:, : self.key_dim]

    @property
    def values(self) -> torch.Tensor:
        """`[heads, value_dim, rank]`."""
        return self.weight[:, self.key_dim :]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries `[T, heads, rotary_dim + key_dim]` as queries of latents: `[.., rotary_dim + rank]`."""
        rotary_dim = query.shape[-1] - self.key_dim
        rotated, unrotated = query.split((rotary_dim, self.key_dim), dim=-1)
        absorbed = torch.einsum("thk,hkr->thr", unrotated, self.keys)
        return torch.cat((rotated, absorbed), dim=-1)

    def project(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the values `[T, heads, value_dim]` of sums of latents `[T, heads, rank]`."""
        return torch.einsum("thr,hvr->thv", latents, self.values)

    def expand(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all heads `[N, heads, L, ..]`, given what `N` blocks store `[N, 1, L, ..]`."""
        num_blocks, _, length, _ = latents.shape
        num_heads = len(self.weight)
        expanded = latents @ self.weight.flatten(0, 1).T
        expanded = expanded.view(num_blocks, length, num_heads, -1).transpose(
            1, 2
        )  # [N, heads, L, key_dim + value_dim]
        keys = expanded[..., : self.key_dim]
        values = expanded[..., self.key_dim :]
        rotated = rotated.expand(-1, num_heads, -1, -1)
        return torch.cat((rotated, keys), dim=-1), values


@dataclass(eq=False, slots=True)
class AttentionParams:
    """Parameters of block attention that a layer's configuration determines."""

    num_kv_heads: int
    """Must divide the number of query heads (grouped-query attention)."""
    scale: float
    """Factor of the scores, usually `head_dim ** -0.5`; positive."""
    rotary: RotarySpec | None = None
    """Rotary embedding of the layer. None: the layer has no RoPE, and its queries are not rotated."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)` (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """`[heads]`. Logit of an attention sink per head, one more term of the merge (gpt-oss)."""
    window: int | None = None
    """Sliding window: number of positions that a query sees, its own included."""
    chunk: int | None = None
    """A query sees the keys of its own chunk of so many positions of its view (Llama 4)."""
    latent: LatentHeads | None = None
    """Heads of a layer that stores latents. None: it stores the keys and values of its heads."""
    batch_invariant: bool = False
    """Whether a query's result on a GPU must have the same bits whatever else the pass has, which is slower. On a CPU,
    it has them anyway."""


class Derived(ABC):
    """Object that is derived from a plan, cached with it, and can be carried over to the next decode step."""

    @abstractmethod
    def next_step(self, plan: AttentionPlan) -> Derived | None:
        """Return the object for `plan`, the plan of the next decode step; None if it must be made again."""


class DeviceBuffers(Derived):
    """Device buffers with the integers of a plan. Kernels captured in a CUDA graph read them again at each replay."""

    @abstractmethod
    def update(self, plan: AttentionPlan) -> bool:
        """Load `plan` into the buffers unless they hold it; return False if it does not fit."""


@dataclass(frozen=True, eq=False)
class Increments:
    """What one decode step adds to the columns of its plan for the next step of the same rows: int64 `[P]` each.

    A block grows by one token or not at all, and every `write_index` grows by one. So all columns but `lo` grow by the
    same numbers at each step, which are computed once.
    """

    delta: np.ndarray  # added to pair_delta
    position: np.ndarray  # added to pair_position
    hi: np.ndarray  # added to pair_hi
    lo: np.ndarray | None = None  # added to pair_lo, under a sliding window only; not constant: it holds for one step


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The (query, block) pairs of a forward pass: rotation and visible keys of each, and where new tokens are stored.

    A layer keeps its keys (and likewise its values) in one tensor of shape `[slots * kv_heads, head_dim]`. A block's
    extent starts at slot `block_origin` and is a contiguous `[kv_heads, block_capacity, head_dim]`; token `j` of the
    block is at index `block_first + j` of it (see `storage_row`). Several blocks may share an extent.

    All arrays are NumPy `int64`. Blocks are in the order of the positions at which their tokens were computed, which
    is the same in every plan. *Pairs* are (query, block) pairs sorted by block: those of block `b` are
    `block_pairs[b] : block_pairs[b + 1]`.
    """

    num_queries: int
    """T, packed new tokens of all rows."""
    block_origin: np.ndarray
    block_capacity: np.ndarray
    block_first: np.ndarray
    """`[B]`. Location of each block, in token slots."""
    block_pairs: np.ndarray
    """`[B + 1]`. Offsets into the pair arrays."""
    pair_query: np.ndarray
    """`[P]`. Index of the packed query."""
    pair_delta: np.ndarray
    """`[P]`. Positions by which the query is rotated before it attends to the block."""
    pair_position: np.ndarray
    """`[P]`. Position of the query in the row's view, counted from the start of the block, masked tokens included."""
    pair_lo: np.ndarray
    pair_hi: np.ndarray
    """`[P]`. The query sees keys `lo <= j < hi` of the block."""
    write_query: np.ndarray
    """`[W]`. Packed tokens whose keys and values are stored (all, except tokens that are computed again)."""
    write_origin: np.ndarray
    write_capacity: np.ndarray
    write_index: np.ndarray
    """`[W]`. Where they are stored: at `write_index` of the extent at `write_origin`."""
    increments: Increments | None = None
    """Difference to the next step, if the pass is a decode step."""
    lineage: object = field(default_factory=object, repr=False)
    """Token of a planned pass and the decode steps that follow from it by `next_step`; other plans have another."""
    step: int = 0
    """Number of decode steps since the planned pass."""
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """Objects derived from the plan, by key; see `cached`."""
    windows: dict[tuple[int | None, int | None], AttentionPlan | None] = field(default_factory=dict, repr=False)
    """The plan under each sliding window and chunk used so far; None where they cut nothing off."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks B that are read in this pass."""
        return len(self.block_origin)

    @property
    def device_buffers(self) -> tuple[DeviceBuffers, ...]:
        """Device buffers that hold this plan."""
        return tuple(value for value in self.derived.values() if isinstance(value, DeviceBuffers))

    @cached_property
    def rotates(self) -> bool:
        """Whether any query is rotated before it attends to a block."""
        return bool(self.pair_delta.any())

    @cached_property
    def longest_run(self) -> int:
        """Largest number of new tokens of a row: consecutive queries that each see one more key."""
        if self.increments is not None or not len(self.pair_query):
            return min(len(self.pair_query), 1)
        is_next_query = np.diff(self.pair_query) == 1
        sees_one_more = np.diff(self.pair_hi) == 1
        is_break = ~(is_next_query & sees_one_more)
        breaks = np.flatnonzero(np.concatenate(([True], is_break, [True])))
        return int(np.diff(breaks).max())

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `derived[key]`, made by `make()` on first use: once per pass instead of once per layer."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def count_by_query(self, queries: np.ndarray) -> np.ndarray:
        """Return how often each query occurs in `queries`; raises ValueError if one is absent: it sees no key."""
        counts = np.bincount(queries, minlength=self.num_queries)
        if self.num_queries and counts.min() == 0:
            raise ValueError(f"query {int(counts.argmin())} of the pass sees no key")
        return counts

    def next_step(self) -> AttentionPlan:
        """Return the plan of the next decode step over the same blocks, with derived objects carried over."""
        step = self.increments
        assert step is not None, "only a decode step has a next step"
        assert step.lo is None, "take the next step of the plan without a window, then call windowed()"
        delta = self.pair_delta + step.delta
        plan = copy.copy(self)  # faster than `dataclasses.replace`
        vars(plan).update(
            step=self.step + 1,
            rotates=bool(delta.any()),
            pair_delta=delta,
            pair_position=self.pair_position + step.position,
            pair_hi=self.pair_hi + step.hi,
            write_index=self.write_index + 1,
            derived={},
            windows={},
        )
        plan._carry_over(self)
        return plan

    def _carry_over(self, previous: AttentionPlan) -> None:
        """Advance what was derived from the previous step's plan by one step."""
        for key, value in previous.derived.items():
            if isinstance(value, Derived):
                carried = value.next_step(self)
                if carried is not None:
                    self.derived[key] = carried
        for limits, previous_narrowed in previous.windows.items():
            narrowed = self._narrowed(*limits)
            self.windows[limits] = narrowed
            if narrowed is None or previous_narrowed is None:
                continue
            if not narrowed._appear(previous_narrowed):
                narrowed._carry_over(previous_narrowed)

    def _appear(self, before: AttentionPlan) -> bool:
        """Whether a block comes into view: one that moves into the chunk of a query, as others before it grow."""
        sees_now = self.pair_lo < self.pair_hi
        saw_none = before.pair_lo >= before.pair_hi
        return bool((sees_now & saw_none).any())

    def windowed(self, window: int | None, chunk: int | None = None) -> AttentionPlan:
        """Return the plan in which a query sees only the last `window` positions, its own included (None: all).

        With `chunk`, it also sees no position before its own chunk.
        """
        if window is chunk is None:
            return self
        limits = window, chunk
        if limits not in self.windows:
            self.windows[limits] = self._narrowed(window, chunk)
        return self.windows[limits] or self

    def _narrowed(self, window: int | None, chunk: int | None) -> AttentionPlan | None:
        lo = self.first_visible(self.pair_position, window, chunk)
        if np.array_equal(lo, self.pair_lo):
            return None
        increments = self.increments
        if increments is not None:
            next_lo = self.first_visible(self.pair_position + increments.position, window, chunk)
            increments = replace(increments, lo=next_lo - lo)
        return replace(self, pair_lo=lo, increments=increments, derived={}, windows={})

    def first_visible(self, position: np.ndarray, window: int | None, chunk: int | None) -> np.ndarray:
        """Return `pair_lo` under a sliding window or in chunks, if the pairs' queries are at `position`."""
        lo = self.pair_lo
        if window is not None:
            lo = np.maximum(lo, position - window + 1)
        if chunk is not None:
            start = self.block_start(position)
            lo = np.maximum(lo, (position + start) // chunk * chunk - start)
        return lo

    def block_start(self, position: np.ndarray) -> np.ndarray:
        """Return the number of tokens before the block of each pair, if the pairs' queries are at `position`: `[P]`."""
        return self.query_position(position)[self.pair_query] - position

    def query_position(self, position: np.ndarray) -> np.ndarray:
        """Return the position of each query in its view, masked tokens included, from those of the pairs: `[T]`."""
        in_view = np.zeros(self.num_queries, np.int64)
        np.maximum.at(in_view, self.pair_query, position)  # the first block of a view starts at 0
        return in_view
