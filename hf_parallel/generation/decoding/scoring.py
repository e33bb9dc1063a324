"""Log-probabilities of given tokens over a tree of shared prefixes; each token is computed once (Hydragen, 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hf_parallel.cache import Segment
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import insert
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.sampling.log_probs import TokenLogProbs
from hf_parallel.kernels import to_device

MAX_LOGITS = 1 << 27
"""Limits the tokens per forward pass by the size of the vocabulary, as all of them may need logits."""

Read = Callable[[torch.Tensor, np.ndarray, np.ndarray], Sequence[np.ndarray]]
"""(logits, index of the logits of each target, targets) -> arrays `[targets, ...]`."""


class ScoringPass(NamedTuple):
    """A forward pass over nodes of a tree: segments, packed tokens, and indices of those whose logits are needed."""

    segments: list[Segment]
    tokens: np.ndarray  # int64 [T]
    keep: np.ndarray  # int64 [k]


class TreeScores:
    """Scores of tokens in the tree of a cache, each of whose tokens is computed once.

    For each pass of `passes`, the caller runs the model and calls `add`. Then `result` returns the scores.

    Parameters
    ----------
    cache : SharedPrefixCache
        It may hold tokens of the rows, but none from the first target's predecessor on.
    rows : sequence of (tokens, first)
        Tokens, int64 `[length]`, whose last one is not computed. Targets are those after index `first`.
    leaves : sequence of Node
        The node of the last computed token of each row.
    read : callable
        See `Read`.
    max_tokens : int
        Maximum number of tokens per pass.
    """

    def __init__(
        self,
        cache: SharedPrefixCache,
        rows: Sequence[tuple[np.ndarray, int]],
        leaves: Sequence[Node],
        read: Read,
        max_tokens: int,
    ) -> None:
        self._read = read
        self._max_tokens = max_tokens
        self._nodes = cache.nodes_to_prefill()
        self._ends = np.cumsum([len(node.uncached) for node in self._nodes])
        starts: dict[Node, int] = {}
        for node, end in zip(self._nodes, self._ends, strict=True):
            starts[node] = end - len(node.tokens)
        predicting = []  # packed tokens that predict each row's targets; cached ones never do
        targets = []
        for (tokens, first), leaf in zip(rows, leaves, strict=True):
            packed = []
            for node in leaf.path:
                start = starts.get(node, -1)
                packed.append(start + np.arange(len(node.tokens)))
            predicting.append(np.concatenate(packed)[first:])
            targets.append(tokens[first + 1 :])
        self._bounds = np.cumsum(list(map(len, predicting)))[:-1]
        self._predicting = np.concatenate(predicting)
        self._targets = np.concatenate(targets)
        self._order: list[np.ndarray] = []  # of the targets of each pass, among all
        self._results: list[Sequence[np.ndarray]] = []

    def passes(self) -> Iterator[ScoringPass]:
        """Yield the passes."""
        packed = np.concatenate([node.uncached for node in self._nodes])
        ends = self._ends.tolist()
        for start in range(0, len(packed), self._max_tokens):
            stop = min(start + self._max_tokens, len(packed))
            in_pass = np.flatnonzero((self._predicting >= start) & (self._predicting < stop))
            self._order.append(in_pass)
            keep, self._queries = np.unique(self._predicting[in_pass] - start, return_inverse=True)
            segments = []
            for node, end in zip(self._nodes, ends, strict=True):
                begin = end - len(node.uncached)
                if begin < stop and end > start:
                    segments.append(Segment(node.view, min(stop, end) - max(start, begin)))
            yield ScoringPass(segments, packed[start:stop], keep)

    def add(self, logits: torch.Tensor) -> None:
        """Read the logits `[k, vocabulary]` of the last pass."""
        targets = self._targets[self._order[-1]]
        self._results.append(self._read(logits, self._queries, targets))

    def result(self) -> list[list[np.ndarray]]:
        """Return for each row what `read` returns for its targets."""
        sorting = np.argsort(np.concatenate(self._order))
        columns = []
        for of_passes in zip(*self._results, strict=True):
            values = np.concatenate(of_passes)[sorting]
            columns.append(np.split(values, self._bounds))
        return [list(row) for row in zip(*columns, strict=True)]


def score_prompts(loop: DecodeLoop, cache: SharedPrefixCache) -> Steps[None]:
    """Compute the prompts of a call, except their last tokens, for the collectors that want their log-probabilities.

    Requires an empty cache, or in an engine a tree of the call's own.
    """
    call = loop.call
    collectors = [collector for collector in loop.sampler.top_log_probs if collector.prompt_top is not None]
    rows = [(prompt, 0) for prompt in call.prompts if len(prompt) > 1]
    if not collectors:
        return
    top = max(collector.prompt_top or 0 for collector in collectors)

    scored: list[list[np.ndarray]] = []
    if rows:
        scored = yield from _score(loop, cache, rows, partial(_ranked, top=top))
    scores = iter(scored)
    prompts: dict[int, list[TokenLogProbs]] = {}
    for row, prompt in enumerate(call.prompts):
        prompts[row] = []
        if len(prompt) == 1:
            continue
        log_probs, ranks, top_values, top_ids = (array.tolist() for array in next(scores))
        for log_prob, rank, values, ids in zip(log_probs, ranks, top_values, top_ids, strict=True):
            prompts[row].append(TokenLogProbs(log_prob, list(zip(ids, values, strict=True)), rank))
    for collector in collectors:
        collector.prompts = prompts


def _score(
    loop: DecodeLoop, cache: SharedPrefixCache, rows: Sequence[tuple[np.ndarray, int]], read: Read
) -> Steps[list[list[np.ndarray]]]:
    """Insert rows into the tree of a cache, compute them, and return for each row what `read` returns."""
    leaves: list[Node] = []
    for tokens, _ in rows:
        leaves.append((yield from insert(cache, tokens[:-1])))
    runner = loop.runner
    max_tokens = max(1, min(runner.chunk_size, MAX_LOGITS // vocabulary_size(loop.call.model)))
    scores = TreeScores(cache, rows, leaves, read, max_tokens)
    for segments, tokens, keep in scores.passes():
        ends = np.cumsum([segment.num_tokens for segment in segments])[:-1]
        parts = [part.tolist() for part in np.split(tokens, ends)]
        logits = yield from runner.forward(list(zip(segments, parts, strict=True)))
        runner.stats.prefilled_tokens += len(tokens)
        scores.add(logits[to_device(keep, logits.device)])
    return scores.result()


def _ranked(logits: torch.Tensor, queries: np.ndarray, targets: np.ndarray, top: int) -> list[np.ndarray]:
    """Return log-probabilities and ranks of targets, `[targets]`, and those and the tokens of the best, `[., top]`."""
    vocabulary = logits.shape[1]
    pairs, pair_of = np.unique(queries * vocabulary + targets, return_inverse=True)  # most are of several rows
    pair_queries, pair_targets = np.divmod(pairs, vocabulary)
    queries_of_pairs = to_device(pair_queries, logits.device)
    targets_of_pairs = to_device(pair_targets, logits.device)
    log_probs = logits.log_softmax(-1, dtype=torch.float32)[queries_of_pairs]
    of_targets = log_probs.gather(1, targets_of_pairs[:, None])
    ranks = (log_probs > of_targets).sum(-1) + 1
    values, ids = log_probs.topk(min(top, vocabulary))
    results = (of_targets[:, 0], ranks, values, ids)
    return [result.cpu().numpy()[pair_of] for result in results]
