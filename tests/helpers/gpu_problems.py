"""Problems of block attention at the sizes of a GPU, compared with the float64 oracle, with poisoned memory.

Memory that no kernel may read is NaN: slots outside the visible blocks, and every uninitialized tensor of a backend,
including its output and its partial results.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from block_oracle import exact_attention

from benchmarks.gpu_parts.layer import Features, Layer, hogwild, new_blocks, rotary_of, shared_prefix
from hf_parallel.cache import Segment
from hf_parallel.kernels import AttentionParams, rotate
from hf_parallel.kernels.torch_attention import write_rows

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
"""Allowed absolute error."""
STALE = 50.0
"""Content of the unused slots of visible blocks: memory is not cleared when it is reused."""
Layout = Callable[[Layer, int], Sequence[Sequence[Segment]]]
"""Creates blocks, with lengths in units of the second argument; returns the passes to run over them."""


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


def check(problem: str, dtype: str, device: torch.device, head_dim: int = 128, heads: int = 8, unit: int = 8) -> float:
    """Return the largest error over all passes of a problem: of attention, "append" or "move"."""
    if problem in ("append", "move"):
        layer = Layer(Features(heads, heads // 2, head_dim, getattr(torch, dtype), rotary_of(head_dim)), device)
        return {"append": _append_error, "move": _move_error}[problem](layer, unit)
    chosen = PROBLEMS[problem]
    layer, error = Layer(chosen.features(heads, head_dim, getattr(torch, dtype)), device), 0.0
    for number, segments in enumerate(chosen.layout(layer, unit)):
        layer.step(segments)
        if number == 0:
            layer.fill()
        _poison(layer)
        with poisoned_memory():
            out = layer.attend()
        error = _worst(error, out, oracle(layer))
    return error


def oracle(layer: Layer) -> torch.Tensor:
    """Return the exact attention of the last pass, computed from the same numbers in float64."""
    f, storage = layer.features, layer.cache.pool.arena.layers[0]
    sinks = None if layer.sinks is None else layer.sinks.double()
    params = AttentionParams(f.kv_heads, f.scale, f.rotary, f.softcap, sinks, f.window)
    numbers = layer.query.double(), storage.keys.double(), storage.values.double()
    return exact_attention(*numbers, layer.forward.plan, params)


def _poison(layer: Layer) -> None:
    """Fill slots outside the visible blocks with NaN, and unused slots of visible blocks with stale values."""
    storage = layer.cache.pool.arena.layers[0]
    inside = torch.zeros(len(storage.keys), dtype=torch.bool, device=layer.device)
    written = torch.zeros_like(inside)
    for block in dict.fromkeys(block for segment in layer.forward.segments for block in segment.view):
        inside[storage.rows(block.extent.range(0, block.extent.capacity)).reshape(-1)] = True
        written[storage.rows(block.tokens).reshape(-1)] = True
    for states in (storage.keys, storage.values):
        states[~inside] = math.nan
        states[inside & ~written] = STALE


def _append_error(layer: Layer, unit: int) -> float:
    """Return whether new keys and values are at the slots of the plan, and no other slot has changed."""
    even, uneven = (shared_prefix(layer, 3 * unit, suffixes, spare=32) for suffixes in ([unit] * 3, [unit, 2, 1]))
    error, dim = 0.0, layer.features.head_dim
    for segments in (even, even, uneven, [Segment(segment.view, 1 + 4 * i) for i, segment in enumerate(uneven)]):
        layer.step(segments)  # allocates the storage and lays out the pass
        layer.fill()
        layer.draw(sum(segment.num_tokens for segment in segments))
        storage = layer.cache.pool.arena.layers[0]
        rows = write_rows(layer.forward.plan, layer.features.kv_heads, layer.device)
        held = storage.keys, storage.values
        pairs = list(zip(held, layer.new, strict=True))
        wanted = [states.clone().index_copy_(0, rows, new.reshape(-1, dim)) for states, new in pairs]
        layer.write()
        error = max(_worst(error, *pair) for pair in zip(held, wanted, strict=True))
    return error


def _move_error(layer: Layer, unit: int) -> float:
    """Return whether a finished step follows the history with rotated keys, and no other slot has changed."""
    rotary = layer.features.rotary
    assert rotary is not None
    decode = shared_prefix(layer, 9 * unit, [5 * unit, 2 * unit, unit], spare=8 * unit)
    layer.step(decode)
    layer.fill()
    source, target = (segment.view[-1] for segment in decode[:2])
    delta, start, storage = target.base + target.length - source.base, target.length, layer.cache.pool.arena.layers[0]
    keys, values = (states[0].clone() for states in layer.held([source]))
    rotated = rotate(keys.double(), *rotary.tables(np.array([delta]), torch.float64, layer.device), rotary)
    wanted_keys, wanted_values = storage.keys.double(), storage.values.clone()
    rows = storage.rows(target.extent.range(start, source.length))
    wanted_keys[rows], wanted_values[rows] = rotated, values
    layer.cache.pool.move(source, target)
    return _worst(_worst(0.0, storage.keys, wanted_keys), storage.values, wanted_values)


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


def _worst(before: float, out: torch.Tensor, expected: torch.Tensor) -> float:
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
