"""Implementations of linear layers, for passes of few tokens.

Each pass appends tokens of one row to a prompt, as a pass with draft tokens does. The linear layers of the model are
also timed alone, on random inputs. Every round runs all implementations.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import native
from hf_parallel.models.cpu.linear import LINEAR_VARIABLE, linear_layers
from hf_parallel.models.intercept.attention import block_attention_enabled
from hf_parallel.progress import progress_bar

from .measure import long_prompt, timed

SIZES: dict[str, Any] = {"prompt": 128, "lengths": (1, 2, 4, 8, 16, 32, 128, 512), "rounds": 15}
"""Tokens before the timed ones, and numbers of tokens in a pass."""
QUICK: dict[str, Any] = {"lengths": (1, 4), "rounds": 1}


@torch.no_grad()
def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return median seconds by library and length."""
    libraries = [name for name in ("torch", "onednn", "native") if name != "native" or not native.unavailable_reason()]
    ids, cache = long_prompt(tokenizer, max(sizes.prompt, *sizes.lengths)), BlockCache()
    prompt, own = cache.pool.new_block(sizes.prompt), cache.pool.new_block(max(sizes.lengths), base=sizes.prompt)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]

    def forward(segment: Segment) -> None:
        plan, tokens = cache.prepare([segment]), ids[:, : segment.num_tokens]
        model(input_ids=tokens, position_ids=plan.position_ids[None], past_key_values=cache, use_cache=True)
        cache.commit()

    def through(length: int) -> None:
        for layer in layers:
            layer(given[length, layer.in_features])

    given = {(n, one.in_features): torch.randn(1, n, one.in_features) for n in sizes.lengths for one in layers}
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    with block_attention_enabled(model, cache):
        forward(Segment([prompt], sizes.prompt))
        for number in progress_bar(range(sizes.rounds + 1), what="Linear layers", unit="rounds"):
            for length in sizes.lengths:
                for library in libraries:
                    with patch.dict(os.environ, {LINEAR_VARIABLE: library}), linear_layers(model):
                        took = timed(lambda: forward(Segment([prompt, own], length)))[0]  # noqa: B023
                        cache.pool.truncate(own, 0)
                        alone = timed(lambda: through(length))[0]  # noqa: B023
                    if number:  # the first round is a warm-up
                        times["passes", library, length].append(took)
                        times["layers", library, length].append(alone)
    medians = {
        what: {name: {str(n): statistics.median(times[what, name, n]) for n in sizes.lengths} for name in libraries}
        for what in ("passes", "layers")
    }
    return {"seconds": medians}
