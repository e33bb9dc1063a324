"""Prompts into a tree of shared prefixes, each unique token computed once (Hydragen, section 3.3), and room below."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_parallel.cache import Segment
from hf_parallel.cache.shared_prefix import Node, SharedPrefixCache
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decode import DecodeLoop

SUFFIX_ROOM = 512
"""Tokens that a completion has room for at first, at most."""
BATCH_ROOM = 1 << 16
"""Tokens that all completions of a call have room for at first, unless that is less than `LEAST_ROOM` for each."""
LEAST_ROOM = 64


def tree_of(call: GenerationCall) -> SharedPrefixCache:
    """The cache that the caller passed, or a new one; it serves the call's model from now on.

    Raises
    ------
    ValueError
        If the caller's is of another kind, or was filled by another model.
    """
    cache = call.past_key_values
    if cache is None:
        cache = SharedPrefixCache(device=call.input_ids.device)
    if not isinstance(cache, SharedPrefixCache):
        raise ValueError(f"past_key_values must be a SharedPrefixCache, got {type(cache).__name__}")
    cache.claim(call.model)
    return cache


def prefill_leaves(loop: DecodeLoop, cache: SharedPrefixCache, leaves: Sequence[Node]) -> torch.Tensor:
    """Compute what the tree does not hold yet, in one pass over all of it.

    Parameters
    ----------
    leaves : sequence of Node
        One per row; rows with the same prompt have the same leaf.

    Returns
    -------
    torch.Tensor
        `[len(leaves), vocabulary]`: what follows each row's prompt. Rows of one leaf share one computation.
    """
    distinct = list(dict.fromkeys(leaves))
    held = sum(len(node.tokens) - len(node.missing) for leaf in leaves for node in leaf.path)
    try:
        nodes = cache.unfilled()
        new = set(nodes)
        again = [leaf for leaf in distinct if leaf not in new]  # held already: ask its last token again
        brought = [(Segment(cache.view(node), len(node.missing)), node.missing.tolist()) for node in nodes]
        brought += [(Segment(cache.view(leaf), 1, write=False), leaf.tokens[-1:].tolist()) for leaf in again]
        place = {node: i for i, node in enumerate([*nodes, *again])}
        logits = loop.prefill(brought)
    except BaseException:
        cache.discard_unfilled()
        raise
    loop.stats.reused_tokens += held
    return logits[torch.tensor([place[leaf] for leaf in leaves], device=logits.device)]


def step_back(loop: DecodeLoop, cache: SharedPrefixCache, leaves: Sequence[Node]) -> list[Node] | None:
    """Leave the last tokens of rows to them, to bring to their first pass themselves, with a draft behind them.

    Parameters
    ----------
    leaves : sequence of Node
        One per row.

    Returns
    -------
    list of Node, optional
        What the leaves, which are no longer in the tree, followed from; all of it is held. None where the tree lacks
        more than one token of a row, or where rows have the last one in common: then it is to be prefilled.
    """
    above = [node for leaf in leaves for node in leaf.path[:-1]]
    own = len(set(leaves)) == len(leaves) and all(leaf.block is None and len(leaf.tokens) == 1 for leaf in leaves)
    if not own or any(len(node.missing) for node in above):
        return None
    parents = []
    for leaf in leaves:
        assert leaf.parent is not None, "a leaf has tokens, the root has none"
        parents.append(leaf.parent)
    cache.discard_unfilled()
    loop.stats.reused_tokens += sum(len(node.tokens) for node in above)
    loop.stats.prefilled_tokens += len(leaves)
    return parents


def first_room(longest: int, rows: int) -> int:
    """Tokens that each of so many completions has room for at first; its room doubles whenever it is outgrown.

    That is the `longest` that one may have, halved until it is little: completions that end early reserve little, and
    those that write on end with room for the `longest` and no more.
    """
    room = longest
    while room > SUFFIX_ROOM or (room > LEAST_ROOM and room * rows > BATCH_ROOM):
        room = -(-room // 2)
    return room
