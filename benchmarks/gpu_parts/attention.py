"""Attention of rows over a shared prefix (Hydragen, section 4.2), compared with other implementations.

FlashAttention reads a dense copy of the prefix for every row. The limit is the time in which the device reads each key
and value once or does the arithmetic, whichever is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from hf_parallel.kernels.dense import flash_package

from . import baselines
from .cases import OUT_OF_MEMORY, Bench, Case, Figures, Target, attempt, figure, fits
from .layer import Features, Layer, shared_prefix

ROWS_CHECKED = 4
"""Number of rows compared with FlashAttention at every size."""
DIFFERENCE = 0.02
"""Tolerance of bf16 outputs: several times the rounding error, a fraction of the error caused by a missing block."""
LARGE_KV_BYTES = 256_000_000
"""Unique keys and values from which the targets of the hardware limit apply."""


@dataclass(frozen=True)
class AttentionStage:
    """Cases by heads, rows and lengths in tokens, multiples of FlashInfer's page."""

    share: ClassVar[float] = 0.14

    # Query heads, KV heads, head_dim of Qwen3-8B, of Llama-2-7B, and of Hydragen's model with a single KV head.
    heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (32, 32, 128), (8, 1, 128))
    rows: tuple[int, ...] = (1, 16, 64, 256, 1024)
    prefixes: tuple[int, ...] = (1024, 4096, 16384, 65536)
    suffixes: tuple[int, ...] = (128, 1024)
    dtype: str = "bfloat16"

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations."""
        for suffix, heads, rows, prefix in itertools.product(self.suffixes, self.heads, self.rows, self.prefixes):
            features = Features(*heads, dtype=getattr(torch, self.dtype))
            kv_bytes = (prefix + rows * suffix) * features.bytes_per_token
            settings = {"heads": list(heads), "rows": rows, "prefix": prefix, "suffix": suffix, "kv_bytes": kv_bytes}
            yield Case(settings, partial(measure, bench, features, rows, prefix, suffix))

    def targets(self) -> list[Target]:
        """See `Stage.targets`. A case that was not measured counts for both bounds."""

        def limit(bound: str, least: float) -> Target:
            def is_large(case: Figures) -> bool:
                return bool(case["kv_bytes"] >= LARGE_KV_BYTES and case.get("bound", bound) == bound)

            what = f"attention, bound by {bound}: fraction of the hardware limit, large KV"
            return Target(what, figure("of_limit", is_large), least, at_least=True)

        words = "attention: difference from FlashAttention's output"
        others = {"flash": "FlashAttention", "flashinfer": "FlashInfer's cascade"}
        return [
            Target(words, lambda cases: [max(found) for case in cases if (found := differences(case))], DIFFERENCE),
            limit("memory", 0.85),
            limit("compute", 0.70),
            *(Target(f"attention: time relative to {name}", _versus(key), 1.0) for key, name in others.items()),
        ]


def differences(case: Figures) -> list[float]:
    """Return the differences from the output of FlashAttention: of a few rows, and of all if they fit in memory."""
    comparisons = (case.get("rows_checked", {}), case.get("flash", {}))
    return [found["difference"] for found in comparisons if "difference" in found]


def _versus(name: str) -> Callable[[list[Figures]], list[float | None]]:
    """Return the times relative to a baseline, except where the baseline runs out of memory."""
    return lambda cases: [
        case.get(f"by_{name}") for case in cases if case.get(name, {}).get("not_measured") != OUT_OF_MEMORY
    ]


def measure(bench: Bench, features: Features, rows: int, prefix: int, suffix: int) -> Figures:
    """Measure the attention of one layer in a decode step, and the baselines.

    `difference` is the largest difference from the output of a baseline, relative to its largest value. If a dense copy
    for all rows does not fit in memory, a few rows are compared.
    """
    timer, ceilings = bench.timer, bench.ceilings
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

    def few() -> Figures:
        return {"difference": difference(dense(min(rows, ROWS_CHECKED))())}

    def flash() -> Figures:
        if not fits(rows * (prefix + suffix) * features.bytes_per_token, timer.device):
            return {"not_measured": OUT_OF_MEMORY}
        return compare(dense(rows))

    def package() -> Figures:
        function = flash_package()
        if function is None or timer.device.type != "cuda":
            return {"not_measured": "flash-attn is not installed, or there is no GPU"}
        if not fits(rows * (prefix + suffix) * features.bytes_per_token, timer.device):
            return {"not_measured": OUT_OF_MEMORY}
        keys, values = (copy.transpose(1, 2) for copy in baselines.dense_copies(layer, root, leaves))

        def attend() -> torch.Tensor:
            found = function(layer.query[:, None], keys, values, softmax_scale=features.scale)
            return (found[0] if isinstance(found, tuple) else found)[:, 0]  # FlashAttention 3 may add the sums

        return compare(attend)

    def cascade() -> Figures:
        try:
            wrapper = baselines.Cascade(layer, root, leaves)
        except ImportError as error:
            return {"not_measured": f"FlashInfer: {error}"}
        return compare(lambda: wrapper.attend(layer.query))

    def compare(run: Callable[[], torch.Tensor]) -> Figures:
        return {"difference": difference(run()), "seconds": timer.median(run)}

    def difference(other: torch.Tensor) -> float:
        return float((other.float() - out[-len(other) :].float()).abs().max() / other.abs().max())

    flops = 4.0 * features.heads * features.head_dim * rows * (prefix + suffix)
    moved = unique + layer.query.nbytes + out.nbytes
    limit = ceilings.limit(moved, flops)
    figures: Figures = {
        "flops": flops,
        "limit_seconds": limit,
        "bound": "memory" if limit == ceilings.limit(moved) else "compute",
        "seconds": seconds,
        "of_limit": limit / seconds,
    }
    others = {"rows_checked": few, "flash": flash, "flash_attn": package, "flashinfer": cascade}
    for name, run in others.items():
        figures[name] = attempt(run)
        if "seconds" in figures[name]:
            figures[f"by_{name}"] = seconds / figures[name]["seconds"]
    return figures
