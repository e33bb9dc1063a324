"""Stage 3: attention of rows over a shared prefix (Hydragen, section 4.2), compared with other implementations.

FlashAttention reads a dense copy of the prefix for every row. The limit is the time in which the device reads each key
and value once or does the arithmetic, whichever is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import baselines
from .cases import OUT_OF_MEMORY, Case, attempt, fits
from .layer import Features, Layer, shared_prefix
from .timing import Ceilings, Timer

ROWS_CHECKED = 4
"""Number of rows compared with FlashAttention at every size."""


@dataclass(frozen=True)
class AttentionStage:
    """Settings and cases.

    Parameters
    ----------
    heads : tuple of (heads, kv_heads, head_dim)
        Qwen3-8B, Llama-2-7B, and a single KV head as in Hydragen.
    rows, prefixes, suffixes : tuple of int
        Lengths in tokens, multiples of FlashInfer's page.
    dtype : str
    """

    heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (32, 32, 128), (8, 1, 128))
    rows: tuple[int, ...] = (1, 16, 64, 256, 1024)
    prefixes: tuple[int, ...] = (1024, 4096, 16384, 65536)
    suffixes: tuple[int, ...] = (128, 1024)
    dtype: str = "bfloat16"

    def cases(self, timer: Timer, ceilings: Ceilings) -> Iterator[Case]:
        """Yield all combinations."""
        for suffix, heads, rows, prefix in itertools.product(self.suffixes, self.heads, self.rows, self.prefixes):
            features = Features(*heads, dtype=getattr(torch, self.dtype))
            kv_bytes = (prefix + rows * suffix) * features.bytes_per_token
            settings = {"heads": list(heads), "rows": rows, "prefix": prefix, "suffix": suffix, "kv_bytes": kv_bytes}
            yield Case(settings, partial(measure, timer, ceilings, features, rows, prefix, suffix))


def measure(
    timer: Timer, ceilings: Ceilings, features: Features, rows: int, prefix: int, suffix: int
) -> dict[str, Any]:
    """Measure the attention of one layer in a decode step, and that of the baselines.

    `difference` is the largest difference from the output of a baseline, relative to its largest value. If a dense copy
    for all rows does not fit in memory, a few rows are compared.
    """
    unique = (prefix + rows * suffix) * features.bytes_per_token
    if not fits(unique, timer.device):
        return {"not_measured": OUT_OF_MEMORY}
    layer = Layer(features, timer.device)
    segments = shared_prefix(layer, prefix, [suffix - 1] * rows)
    layer.step(segments)
    layer.fill()
    root, leaves = segments[0].view[0], [segment.view[-1] for segment in segments]
    out = layer.attend()
    if not bool(torch.isfinite(out).all()):
        raise FloatingPointError("block attention gave NaN or infinity")
    seconds = timer.median(layer.attend)

    def dense(count: int) -> Callable[[], torch.Tensor]:
        """Return a call of FlashAttention for the last rows, whose storage is farthest from the first ones."""
        keys, values = baselines.dense_copies(layer, root, leaves[-count:])
        return lambda: baselines.flash(layer.query[-count:], keys, values, features.scale)

    def rows_checked() -> dict[str, Any]:
        return {"difference": difference(dense(min(rows, ROWS_CHECKED))())}

    def flash() -> dict[str, Any]:
        if not fits(rows * (prefix + suffix) * features.bytes_per_token, timer.device):
            return {"not_measured": OUT_OF_MEMORY}
        return compare(dense(rows))

    def cascade() -> dict[str, Any]:
        try:
            wrapper = baselines.Cascade(layer, root, leaves)
        except ImportError as error:
            return {"not_measured": f"FlashInfer: {error}"}
        return compare(lambda: wrapper.attend(layer.query))

    def compare(run: Callable[[], torch.Tensor]) -> dict[str, Any]:
        return {"difference": difference(run()), "seconds": timer.median(run)}

    def difference(other: torch.Tensor) -> float:
        return float((other.float() - out[-len(other) :].float()).abs().max() / other.abs().max())

    flops = 4.0 * features.heads * features.head_dim * rows * (prefix + suffix)
    moved = unique + layer.query.nbytes + out.nbytes
    limit = ceilings.limit(moved, flops)
    figures: dict[str, Any] = {
        "flops": flops,
        "limit_seconds": limit,
        "bound": "memory" if limit == ceilings.limit(moved) else "compute",
        "seconds": seconds,
        "of_limit": limit / seconds,
    }
    for name, run in (("rows_checked", rows_checked), ("flash", flash), ("flashinfer", cascade)):
        figures[name] = attempt(run)
        if "seconds" in figures[name]:
            figures[f"by_{name}"] = seconds / figures[name]["seconds"]
    return figures
