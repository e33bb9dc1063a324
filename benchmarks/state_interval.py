"""Memory of states kept within prompts, against tokens computed again where prompts diverge. Runs without a model.

Prompts pass through an engine's prefix tree, each computed as far as the tree has no state to continue from. The sizes
of states and keys are those of Qwen3.5-9B in bfloat16, with recurrent states in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import Qwen3_5TextConfig

from hf_parallel.cache.pool import Pool
from hf_parallel.cache.tree import PrefixTree

SIZES, QUICK = {"prompts": 200}, {"prompts": 20}
INTERVALS = (128, 256, 512, 1024, 2048, 4096, None)


def load(options: Any) -> tuple[None, None]:
    """Load nothing."""
    return None, None


def bytes_of() -> tuple[int, int]:
    """Return the bytes of the keys and values of a token, and of a state."""
    config = Qwen3_5TextConfig()
    assert config.layer_types is not None
    linear = config.layer_types.count("linear_attention")
    token = (config.num_hidden_layers - linear) * 2 * config.num_key_value_heads * config.head_dim * 2
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * config.linear_conv_kernel_dim * 2
    return token, linear * (conv + values * config.linear_key_head_dim * 4)


def prompts(kind: str, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the prompts of conversations, some of whose turns edit earlier text, or of one edited file."""
    shared = rng.integers(0, 10**6, 2000)
    text = shared if kind == "chat" else np.concatenate([shared, rng.integers(0, 10**6, 14000)])
    for index in range(count):
        if kind == "chat" and index % 10 == 0:
            text = shared
        if kind == "file" or rng.random() < 0.2:
            text = text[: rng.integers(len(shared), len(text) + 1)]
            text = np.concatenate([text, rng.integers(0, 10**6, 16000 - len(text) if kind == "file" else 0)])
        text = text if kind == "file" else np.concatenate([text, rng.integers(0, 10**6, 900)])
        yield text


def count_tokens(kind: str, count: int, interval: int | None, has_states: bool) -> tuple[int, int, int]:
    """Return the tokens computed for all prompts, and the tokens and states that the tree then holds."""
    tree, computed = PrefixTree(Pool()), 0
    tree.pool.states.in_use, tree.state_interval = has_states, interval
    for tokens in prompts(kind, count, np.random.default_rng(0)):
        tree.insert(tokens, tree.root)
        for node in tree.nodes_to_prefill():
            assert node.block is not None
            computed += len(node.uncached)
            node.block.length = node.block.state_at = len(node.tokens)
    nodes = list(tree.nodes())
    return computed, sum(node.num_cached for node in nodes), len(nodes)


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    token_bytes, state_bytes = bytes_of()
    found: dict[str, Any] = {"chat": {}, "file": {}}
    for kind, rows in found.items():
        new, _, _ = count_tokens(kind, sizes.prompts, None, has_states=False)
        for interval in INTERVALS:
            computed, tokens, states = count_tokens(kind, sizes.prompts, interval, has_states=True)
            rows[str(interval)] = {
                "computed_again": (computed - new) / sizes.prompts,
                "states": states,
                "state_bytes": states * state_bytes,
                "kv_bytes": tokens * token_bytes,
            }
    return {"prompts": found, "token_bytes": token_bytes, "state_bytes": state_bytes}
