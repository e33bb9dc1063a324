"""Stage 1: every kernel compared with the float64 oracle on random numbers, with poisoned memory.

Memory that no kernel may read is NaN: slots outside the visible blocks, and every uninitialized tensor of a backend,
including its output and its partial results.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_parallel.cache import Segment
from hf_parallel.kernels import rotate
from hf_parallel.kernels.torch_attention import write_rows

from . import baselines
from .cases import Case
from .layer import Features, Layer, hogwild, new_blocks, rotary_of, shared_prefix

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
"""Allowed absolute error."""
Layout = Callable[[Layer, int], Sequence[Sequence[Segment]]]
"""Creates blocks, with lengths in units of the second argument; returns the passes to run over them."""


# Layouts


def tree(layer: Layer, unit: int) -> Sequence[Sequence[Segment]]:
    """Three decode steps of rows at two levels of a tree; the later plans are derived from the first."""
    root, middle = new_blocks(layer, [20 * unit, 7 * unit])
    middle.base = root.length
    deep = new_blocks(layer, [unit * i // 2 + 1 for i in range(6)], base=root.length + middle.length, spare=4)
    flat = new_blocks(layer, [3 * unit, 1], base=root.length, spare=4)
    rows = [*([root, middle, leaf] for leaf in deep), *([root, leaf] for leaf in flat)]
    return [[Segment(row, 1) for row in rows]] * 3


def workers(layer: Layer, unit: int) -> Sequence[Sequence[Segment]]:
    """Three decode steps of four Hogwild! workers."""
    return [hogwild(layer, 4, 32 * unit + 40, spare=4)] * 3


def wide(layer: Layer, unit: int) -> Sequence[Sequence[Segment]]:
    """More rows over one prefix than one program processes."""
    return [shared_prefix(layer, 20 * unit, [1 + i % unit for i in range(12 * unit)], spare=2)] * 2


def ragged(layer: Layer, unit: int) -> Sequence[Sequence[Segment]]:
    """Rows with different numbers of new tokens in one pass; one row recomputes cached tokens."""
    segments = shared_prefix(layer, 13 * unit, [unit, 2 * unit, 1, 5], spare=16)
    again = Segment(segments[-1].view, 3, write=False)
    return [[*(Segment(segment.view, n) for segment, n in zip(segments, (1, 9, 4), strict=False)), again]]


def long(layer: Layer, unit: int) -> Sequence[Sequence[Segment]]:
    """Few rows over a long prefix, which many programs share."""
    return [shared_prefix(layer, 640 * unit, [unit, 2 * unit, 60 * unit], spare=2)] * 2


def prefill(layer: Layer, unit: int) -> Sequence[Sequence[Segment]]:
    """Two prompts in one pass, one of them after cached tokens."""
    return [[Segment(new_blocks(layer, [held], spare=12 * unit), 12 * unit) for held in (0, 5 * unit)]]


@dataclass(frozen=True)
class Problem:
    """Layout and features of the layer; `groups` heads share a KV head."""

    layout: Layout
    groups: int = 4
    turns: bool = False
    part: int = 1
    interleaved: bool = False
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None

    def features(self, heads: int, head_dim: int, dtype: torch.dtype) -> Features:
        """Return the features of a layer of this size."""
        kv_heads = max(heads // self.groups, 1)
        rotary = rotary_of(head_dim, self.part, self.interleaved) if self.turns else None
        return Features(heads, kv_heads, head_dim, dtype, rotary, self.softcap, sinks=self.sinks, window=self.window)


PROBLEMS = {
    "tree": Problem(tree),
    "hogwild": Problem(workers, turns=True),
    "wide": Problem(wide),
    "ragged": Problem(ragged, groups=1),
    "long": Problem(long, groups=8),
    "window": Problem(workers, turns=True, window=37),
    "softcap": Problem(tree, softcap=1.5),
    "sinks": Problem(tree, sinks=True),
    "prefill": Problem(prefill),
    "window prefill": Problem(prefill, turns=True, window=37),
    "interleaved": Problem(workers, groups=1, turns=True, part=2, interleaved=True),
}
"""Attention problems by name."""


@dataclass(frozen=True)
class CorrectnessStage:
    """Settings and cases.

    Parameters
    ----------
    head_dims : tuple of int
    dtypes : tuple of str
    heads : int
    unit : int
        Unit of block lengths, see `Layout`.
    problems : tuple of str
        Keys of `PROBLEMS`, "append" and "move".
    """

    head_dims: tuple[int, ...] = (128, 64, 80, 96, 256)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    heads: int = 8
    unit: int = 8
    problems: tuple[str, ...] = (*PROBLEMS, "append", "move")

    def cases(self, device: torch.device) -> Iterator[Case]:
        """Yield all problems in all dtypes: first at the first head size, then bf16 at the others, then the rest."""
        first, *others = self.head_dims
        for dim, dtype in [(first, dtype) for dtype in self.dtypes] + [(d, t) for t in self.dtypes for d in others]:
            for name in self.problems:
                check = {"append": check_append, "move": check_move}.get(name) or partial(check_attention, name)
                run = partial(check, device, self.heads, dim, dtype, self.unit)
                yield Case({"problem": name, "head_dim": dim, "dtype": dtype}, run)


def check_attention(
    name: str, device: torch.device, heads: int, head_dim: int, dtype: str, unit: int
) -> dict[str, Any]:
    """Return the errors of block attention, and of FlashAttention over dense copies of the keys, over all passes."""
    problem = PROBLEMS[name]
    layer = Layer(problem.features(heads, head_dim, getattr(torch, dtype)), device)
    error, flash_error, rounding = 0.0, 0.0, 0.0
    for number, segments in enumerate(problem.layout(layer, unit)):
        layer.step(segments)
        if number == 0:
            layer.fill()
        layer.poison()
        with poisoned_memory():
            out = layer.attend()
        expected = layer.oracle()
        error = worst(error, out, expected)
        rounding = max(rounding, 0.5 * torch.finfo(out.dtype).eps * float(expected.abs().max()))
        if _flash_can(problem, dtype):
            flash_error = worst(flash_error, _flash(layer), expected)
    figures = _figures(error, dtype)
    if _flash_can(problem, dtype):
        # The output of every kernel has an error of half a unit in the last place.
        figures |= {"flash_error": flash_error, "error_by_flash": error / max(flash_error, rounding)}
    return figures


def check_append(device: torch.device, heads: int, head_dim: int, dtype: str, unit: int) -> dict[str, Any]:
    """Check that the new keys and values are at the slots of the plan, and that no other slot has changed."""
    layer = Layer(Features(heads, heads // 2, head_dim, getattr(torch, dtype)), device)
    even, uneven = (shared_prefix(layer, 3 * unit, suffixes, spare=32) for suffixes in ([unit] * 3, [unit, 2, 1]))
    error = 0.0
    for segments in (even, even, uneven, [Segment(segment.view, 1 + 4 * i) for i, segment in enumerate(uneven)]):
        layer.step(segments)  # allocates the storage and lays out the pass
        layer.fill()
        layer.draw(sum(segment.num_tokens for segment in segments))
        storage, rows = layer.cache.pool.arena.layers[0], write_rows(layer.forward.plan, heads // 2, device)
        held = storage.keys, storage.values
        wanted = [
            states.clone().index_copy_(0, rows, new.reshape(-1, head_dim))
            for states, new in zip(held, layer.new, strict=True)
        ]
        layer.write()
        error = max(worst(error, *pair) for pair in zip(held, wanted, strict=True))
    return _figures(error, dtype) | {"ok": error == 0}


def check_move(device: torch.device, heads: int, head_dim: int, dtype: str, unit: int) -> dict[str, Any]:
    """Check that a finished step follows the history with rotated keys, and that no other slot has changed."""
    rotary = rotary_of(head_dim)
    layer = Layer(Features(heads, heads // 2, head_dim, getattr(torch, dtype), rotary), device)
    decode = shared_prefix(layer, 9 * unit, [5 * unit, 2 * unit, unit], spare=8 * unit)
    layer.step(decode)
    layer.fill()
    source, target = (segment.view[-1] for segment in decode[:2])
    delta, start, storage = target.base + target.length - source.base, target.length, layer.cache.pool.arena.layers[0]
    keys, values = (states[0].clone() for states in layer.held([source]))
    rotated = rotate(keys.double(), *rotary.tables(np.array([delta]), torch.float64, device), rotary)
    wanted_keys, wanted_values = storage.keys.double(), storage.values.clone()
    rows = storage.rows(target.extent.range(start, source.length))
    wanted_keys[rows], wanted_values[rows] = rotated, values
    layer.cache.pool.move(source, target)
    error = worst(worst(0.0, storage.keys, wanted_keys), storage.values, wanted_values)
    return _figures(error, dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN inside the block, as deterministic algorithms do."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


def _figures(error: float, dtype: str) -> dict[str, Any]:
    return {"max_error": error, "tolerance": TOLERANCE[dtype], "ok": error <= TOLERANCE[dtype]}


def worst(before: float, out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the larger absolute error.

    Raises
    ------
    FloatingPointError
        If a value is NaN: poisoned memory was read, or an output was not written.
    """
    error = float((out.double() - expected.double()).abs().max())
    if not math.isfinite(error):
        lost = int((~torch.isfinite(out)).sum())
        raise FloatingPointError(f"{lost} of {out.numel()} numbers are NaN or infinite")
    return max(before, error)


def _flash_can(problem: Problem, dtype: str) -> bool:
    """Return whether FlashAttention computes the same: it has no soft-capping, no sinks, and no float32 on a GPU."""
    return problem.softcap is None and not problem.sinks and dtype != "float32"


def _flash(layer: Layer) -> torch.Tensor:
    """Compute the same pass by FlashAttention, one query at a time."""
    out = []
    for token in range(len(layer.query)):
        keys, values = baselines.view_of(layer, token)
        out.append(baselines.flash(layer.query[token : token + 1], keys[None], values[None], layer.features.scale))
    return torch.cat(out)
