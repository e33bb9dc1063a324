"""Prefill of a tree of shared prefixes, each unique token computed once (Hydragen, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hf_parallel.cache import Segment
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.rows import PassInputs
from hf_parallel.generation.decoding.wants import Prefix, Steps

SUFFIX_CAPACITY = 512  # maximum initial capacity of a completion, in tokens
BATCH_CAPACITY = 1 << 16  # maximum of all completions together, unless each would have less than `MIN_CAPACITY`
MIN_CAPACITY = 64


def prefix_cache_of(call: GenerationCall) -> SharedPrefixCache:
    """Return the caller's `SharedPrefixCache`, or a new one."""
    cache = call.past_key_values
    if cache is None:
        cache = call.new_cache(SharedPrefixCache)
    if not isinstance(cache, SharedPrefixCache):
        raise ValueError(f"past_key_values must be a SharedPrefixCache, got {type(cache).__name__}")
    call.begin_cache(cache)
    return cache


def count_cached(loop: DecodeLoop, leaves: Sequence[Node]) -> None:
    """Count the tokens of the call's prompts that were cached before the call. `leaves` begin with the prompts."""
    if loop.stats.prefilled_tokens:
        return  # the call itself has computed tokens
    prompts = {prompt.tobytes(): len(prompt) for prompt in loop.call.prompts}
    lengths = set(prompts.values())
    cached_tokens: dict[bytes, int] = {}  # by prompt
    for leaf in dict.fromkeys(leaves):
        tokens = np.concatenate([node.tokens for node in leaf.path])
        for length in lengths:
            prompt_key = tokens[:length].tobytes()
            if prompt_key not in prompts:
                continue
            count = 0
            left = length
            for node in leaf.path:
                count += min(len(node.tokens) - len(node.uncached), left)
                left = max(left - len(node.tokens), 0)
            cached_tokens[prompt_key] = count
    loop.stats.cached_tokens = sum(cached_tokens.values())


def insert(cache: SharedPrefixCache, tokens: np.ndarray, root: Node | None = None, gap: int = 0) -> Steps[Node]:
    """Insert tokens into the tree of a cache; see `SharedPrefixCache.insert`. No other run computes any of them."""
    yield Prefix(tokens, root or cache.root, gap)
    return cache.insert(tokens, root, gap)


def insert_prompt(cache: SharedPrefixCache, tokens: np.ndarray, gaps: Mapping[int, int]) -> Steps[Node]:
    """Insert a prompt; `gaps` is the number of masked tokens before the token at an index (`GenerationCall`)."""
    node = cache.root
    starts = [0, *gaps]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        node = yield from insert(cache, tokens[start:stop], node, gaps.get(start, 0))
    return node


def insert_prompts(call: GenerationCall, cache: SharedPrefixCache) -> Steps[list[Node]]:
    """Insert the prompts of a call; return the node of the last token of each."""
    leaves: list[Node] = []
    for tokens, gaps in zip(call.prompts, call.gaps, strict=True):
        leaves.append((yield from insert_prompt(cache, tokens, gaps)))
    return leaves


def prefill_leaves(loop: DecodeLoop, cache: SharedPrefixCache, leaves: Sequence[Node]) -> Steps[torch.Tensor]:
    """Compute all uncached tokens of the tree. Return the logits after each row's leaf, `[len(leaves), vocabulary]`.

    Raises `TypeError` if a leaf is not a node: `insert_prompts` was called without `yield from`.
    """
    for leaf in leaves:
        if not isinstance(leaf, Node):
            hint = "functions that return Steps, such as insert_prompts, are called with `yield from`"
            raise TypeError(f"leaves must be nodes of the prefix tree, got a {type(leaf).__name__}: {hint}")
    count_cached(loop, leaves)
    reused = 0
    for leaf in leaves:
        reused += sum(len(node.tokens) - len(node.uncached) for node in leaf.path)
    inputs: PassInputs = []
    index_of: dict[Node, int] = {}  # of a node's last token in the logits
    for node in cache.nodes_to_prefill():
        index_of[node] = len(inputs)
        inputs.append((Segment(node.view, len(node.uncached)), node.uncached.tolist()))
    for leaf in dict.fromkeys(leaves):
        if leaf not in index_of:  # recompute the last token for its logits
            index_of[leaf] = len(inputs)
            segment = Segment(leaf.view, 1, write=False)
            inputs.append((segment, leaf.tokens[-1:].tolist()))
    logits = yield from loop.runner.prefill(inputs)
    loop.stats.reused_tokens += reused
    indices = torch.tensor([index_of[leaf] for leaf in leaves], device=logits.device)
    return logits[indices]


def defer_last_tokens(loop: DecodeLoop, cache: SharedPrefixCache, leaves: Sequence[Node]) -> list[Node] | None:
    """Remove leaves that hold one uncached token, and return their parents: the rows compute it in their first pass.

    Return None, and remove nothing, if a row has more than one uncached token or shares that token with another row.
    """
    if len(set(leaves)) < len(leaves):
        return None
    ancestors: list[Node] = []
    for leaf in leaves:
        if leaf.block is not None or len(leaf.tokens) != 1:
            return None
        ancestors += leaf.path[:-1]
    if any(len(node.uncached) for node in ancestors):
        return None
    count_cached(loop, leaves)
    parents = [leaf.parent for leaf in leaves if leaf.parent is not None]  # none is dropped: the root has no token
    cache.discard_uncached()
    loop.stats.reused_tokens += sum(len(node.tokens) for node in ancestors)
    loop.stats.prefilled_tokens += len(leaves)
    return parents


def initial_capacity(longest: int, rows: int) -> int:
    """Return the initial capacity of each completion in tokens: the maximum length `longest`, halved to fit the limits.

    A block that outgrows its capacity doubles it, so the capacity of the longest completions ends at about `longest`.
    """
    capacity = longest
    while capacity > SUFFIX_CAPACITY or (capacity > MIN_CAPACITY and capacity * rows > BATCH_CAPACITY):
        capacity = -(-capacity // 2)
    return capacity
