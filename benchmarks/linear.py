"""Implementations of linear layers, for passes of few tokens.

Each pass appends tokens of one row to a prompt, as a pass with draft tokens does. The linear layers of the model are
also timed alone, on random inputs. Every round runs all implementations.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import native
from hf_parallel.models.attention import block_attention_enabled
from hf_parallel.models.linear import LINEAR_VARIABLE, linear_layers

from .measure import long_prompt
from .report import run_benchmark

PROMPT = 128
"""Tokens before the timed ones."""
LENGTHS = (1, 2, 4, 8, 16, 32, 128, 512)
"""Numbers of tokens in a pass."""


def run(model: Any, ids: torch.Tensor, lengths: tuple[int, ...] = LENGTHS, rounds: int = 15) -> dict[str, Any]:
    """Measure with `ids`, `int64 [1, at least PROMPT]`; return median seconds by library and length."""
    libraries = [name for name in ("torch", "onednn", "native") if name != "native" or not native.unavailable_reason()]
    cache = BlockCache()
    prompt, own = cache.pool.new_block(PROMPT), cache.pool.new_block(max(lengths), base=PROMPT)
    forward(model, cache, Segment([prompt], PROMPT), ids)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for length in lengths:
            for library in libraries:
                with patch.dict(os.environ, {LINEAR_VARIABLE: library}), linear_layers(model):
                    took = forward(model, cache, Segment([prompt, own], length), ids)
                    cache.pool.truncate(own, 0)
                    alone = through(layers, length)
                if number:  # the first round is a warm-up
                    times["passes", library, length].append(took)
                    times["layers", library, length].append(alone)
    return {
        what: {name: {str(n): statistics.median(times[what, name, n]) for n in lengths} for name in libraries}
        for what in ("passes", "layers")
    }


@torch.no_grad()
def forward(model: Any, cache: BlockCache, segment: Segment, ids: torch.Tensor) -> float:
    """Return the seconds of a pass with the first `segment.num_tokens` of `ids`."""
    with block_attention_enabled(model, cache):
        began = time.perf_counter()
        plan = cache.prepare([segment])
        tokens = ids[:, : segment.num_tokens]
        model(input_ids=tokens, position_ids=plan.position_ids[None], past_key_values=cache, use_cache=True)
        cache.commit()
        return time.perf_counter() - began


@torch.no_grad()
def through(layers: list[nn.Linear], length: int) -> float:
    """Return the seconds of all layers, one after the other."""
    given = {layer.in_features: torch.randn(1, length, layer.in_features) for layer in layers}
    began = time.perf_counter()
    for layer in layers:
        layer(given[layer.in_features])
    return time.perf_counter() - began


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        lengths, rounds = ((1, 4), 1) if options.quick else (LENGTHS, options.rounds)
        return {"seconds": run(model, long_prompt(tokenizer, max(PROMPT, *lengths)), lengths, rounds)}

    return run_benchmark("linear", __doc__, measure, rounds=15)


if __name__ == "__main__":
    sys.exit(main())
