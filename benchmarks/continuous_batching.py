"""Continuous batching of transformers, which several benchmarks measure beside this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

PAGE = 256
"""Tokens of a page of its cache. Requests share the pages of equal prefixes."""


def generate_batch(model: Any, prompts: Sequence[list[int]], new_tokens: int, rows: int = 1, **settings: Any) -> Any:
    """Return the finished requests: `rows` per prompt, with exactly `new_tokens` tokens each.

    Raises
    ------
    RuntimeError
        If a request fails.
    """
    pages = rows * sum(-(-(len(prompt) + new_tokens) // PAGE) + 1 for prompt in prompts)
    size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # in transformers 5.17.0
    sizes: dict[str, Any] = {size: PAGE, "num_blocks": pages, "max_batch_tokens": max(PAGE, *map(len, prompts))}
    batching = ContinuousBatchingConfig(**sizes)
    if model.device.type == "cpu":
        batching.use_cuda_graph, batching.use_async_batching = False, False
    config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0, **settings)
    config.num_return_sequences = rows  # its constructor rejects this without sampling
    done = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=batching,
        record_timestamps=True,
        progress_bar=False,
    )
    requests = list(done.values())
    errors = [request.error for request in requests if request.error]
    if errors or len(requests) != rows * len(prompts):
        raise RuntimeError(errors[0] if errors else f"{len(requests)} of {rows * len(prompts)} requests came back")
    return requests
