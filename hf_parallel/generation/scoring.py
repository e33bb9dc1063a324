"""Log-probabilities of given tokens over a tree of shared prefixes; each token is computed once (Hydragen, 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from hf_parallel.cache import Segment
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.log_probs import TokenLogProbs
from hf_parallel.kernels import to_device

MAX_LOGITS = 1 << 27
"""Limits the tokens per forward pass by the size of the vocabulary, as all of them may need logits."""

Forward = Callable[[list[Segment], np.ndarray, np.ndarray], torch.Tensor]
"""(segments, their packed tokens, indices of tokens) -> logits after these tokens, `[len(indices), vocabulary]`."""
Read = Callable[[torch.Tensor, np.ndarray, np.ndarray], Sequence[np.ndarray]]
"""(logits, index of the logits of each target, targets) -> arrays `[targets, ...]`."""


def score_tree(
    cache: SharedPrefixCache, rows: Sequence[tuple[np.ndarray, int]], forward: Forward, read: Read, max_tokens: int
) -> list[list[np.ndarray]]:
    """Insert rows into the tree of a cache, compute them, and return for each row what `read` returns for its targets.

    Parameters
    ----------
    cache : SharedPrefixCache
        It may hold tokens of the rows, but none from the first target's predecessor on.
    rows : sequence of (tokens, first)
        Tokens, int64 `[length]`, whose last one is not computed. Targets are those after index `first`.
    forward, read : callable
        See `Forward` and `Read`; `forward` computes the tokens of at most `max_tokens` per pass.
    max_tokens : int
    """
    leaves = [cache.insert(tokens[:-1]) for tokens, _ in rows]
    nodes = cache.nodes_to_prefill()
    ends = np.cumsum([len(node.uncached) for node in nodes])
    starts = {node: end - len(node.tokens) for node, end in zip(nodes, ends, strict=True)}
    # Packed tokens that predict each row's targets; cached ones never do
    predicting = [
        np.concatenate([starts.get(node, -1) + np.arange(len(node.tokens)) for node in leaf.path])[first:]
        for (_, first), leaf in zip(rows, leaves, strict=True)
    ]
    places, targets = np.concatenate(predicting), np.concatenate([tokens[first + 1 :] for tokens, first in rows])
    packed = np.concatenate([node.uncached for node in nodes])
    parts = [(node, end - len(node.uncached), end) for node, end in zip(nodes, ends.tolist(), strict=True)]
    order: list[np.ndarray] = []
    found: list[Sequence[np.ndarray]] = []
    for start in range(0, len(packed), max_tokens):
        stop = min(start + max_tokens, len(packed))
        order.append(np.flatnonzero((places >= start) & (places < stop)))
        keep, queries = np.unique(places[order[-1]] - start, return_inverse=True)
        segments = [
            Segment(node.view, min(stop, end) - max(start, begin))
            for node, begin, end in parts
            if begin < stop and end > start
        ]
        found.append(read(forward(segments, packed[start:stop], keep), queries, targets[order[-1]]))
    sorting = np.argsort(np.concatenate(order))
    bounds = np.cumsum(list(map(len, predicting)))[:-1]
    columns = [np.split(np.concatenate(column)[sorting], bounds) for column in zip(*found, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def score_prompts(loop: DecodeLoop, cache: SharedPrefixCache) -> None:
    """Compute the prompts of a call, except their last tokens, for the collectors that want their log-probabilities.

    Requires an empty cache, or in an engine a tree of the call's own.
    """
    call, runner = loop.call, loop.runner
    collectors = [one for one in loop.sampler.top_log_probs if one.prompt_top is not None]
    rows = [(prompt, 0) for prompt in call.prompts if len(prompt) > 1]
    if not collectors:
        return
    top = max(one.prompt_top or 0 for one in collectors)

    def forward(segments: list[Segment], tokens: np.ndarray, keep: np.ndarray) -> torch.Tensor:
        ends = np.cumsum([segment.num_tokens for segment in segments])[:-1]
        own = [part.tolist() for part in np.split(tokens, ends)]
        logits = runner.forward(list(zip(segments, own, strict=True)))
        runner.stats.prefilled_tokens += len(tokens)
        return logits[to_device(keep, logits.device)]

    max_tokens = max(1, min(runner.chunk_size, MAX_LOGITS // vocabulary_size(call.model)))
    scores = iter(score_tree(cache, rows, forward, partial(_ranked, top=top), max_tokens) if rows else ())
    found: dict[int, list[TokenLogProbs]] = {}
    for row, prompt in enumerate(call.prompts):
        parts = [array.tolist() for array in next(scores)] if len(prompt) > 1 else [[]] * 4
        found[row] = [
            TokenLogProbs(value, list(zip(ids, values, strict=True)), rank)
            for value, rank, values, ids in zip(*parts, strict=True)
        ]
    for collector in collectors:
        collector.prompts = found


def _ranked(logits: torch.Tensor, queries: np.ndarray, targets: np.ndarray, top: int) -> list[np.ndarray]:
    """Return log-probabilities and ranks of targets, `[targets]`, and those and the tokens of the best, `[., top]`."""
    size = logits.shape[1]
    pairs, places = np.unique(queries * size + targets, return_inverse=True)  # most are of several rows
    rows, chosen = (to_device(part, logits.device) for part in np.divmod(pairs, size))
    every = logits.log_softmax(-1, dtype=torch.float32)[rows]
    own = every.gather(1, chosen[:, None])
    values, ids = every.topk(min(top, size))
    return [part.cpu().numpy()[places] for part in (own[:, 0], (every > own).sum(-1) + 1, values, ids)]
