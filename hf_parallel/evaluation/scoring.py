"""Log-likelihoods of continuations over a tree of shared prefixes (Hydragen, section 3.3).

Contexts and continuations form a tree of tokens: few-shot examples, then a question, then its choices. Each token is
computed once, and logits only where a token of a continuation follows. The tree is computed depth first, in batches of
bounded size, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_parallel.cache import Segment
from hf_parallel.cache.placement import cpu_as_default, execution_device
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node, common_prefix
from hf_parallel.generation import arguments
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.claim import Claim
from hf_parallel.generation.enabled import enabled
from hf_parallel.generation.mixin import ParallelGenerationMixin, unwrap
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.validation import check_int
from hf_parallel.kernels import to_device
from hf_parallel.models.attention import UnsupportedModelError, gradient_checkpointing_disabled
from hf_parallel.models.cached_model import PREFILL_CHUNK, CachedModel
from hf_parallel.models.linear import linear_layers

MAX_LOGITS = 1 << 27
"""Maximum number of logits per forward pass; at least those of one token."""
SOFTMAX_ROWS = 128
"""Maximum number of distributions normalized at a time."""

Score = tuple[float, bool]
"""Log-likelihood of a continuation, and whether greedy decoding would generate it."""


@dataclass(frozen=True, eq=False)
class _Row:
    """A context with its continuation."""

    index: int  # among the arguments
    tokens: np.ndarray  # int64 [length]
    first: int  # index of the token whose logits predict the continuation's first one

    @property
    def inputs(self) -> np.ndarray:
        """Tokens that the model reads: all but the last."""
        return self.tokens[:-1]


@dataclass(frozen=True, eq=False)
class _Part:
    """Tokens of a node among the packed tokens of a batch: all of a new node, the last ones of a cached node."""

    node: Node
    start: int  # index of the first token among the packed tokens
    skipped: int  # tokens of the node before it
    write: bool

    @property
    def tokens(self) -> np.ndarray:
        return self.node.tokens[self.skipped :]

    @property
    def stop(self) -> int:
        """Index after the last token among the packed tokens."""
        return self.start + len(self.node.tokens) - self.skipped


@dataclass(frozen=True, eq=False)
class _Targets:
    """Tokens of continuations, all int64 `[targets]`: rows of the batch, packed tokens that predict them, and ids."""

    rows: np.ndarray
    places: np.ndarray
    ids: np.ndarray


def loglikelihoods(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
    continuations: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
    max_batch_tokens: int = PREFILL_CHUNK,
    softmax_dtype: torch.dtype | None = None,
    stats: GenerationStats | None = None,
    on_scored: Callable[[int, Score], None] | None = None,
) -> list[Score]:
    """Return the log-likelihood of each continuation after its context, and whether it is the greedy one.

    Equals plain forward passes over each context with its continuation, but computes shared tokens once. Rows may be in
    any order.

    Parameters
    ----------
    model : PreTrainedModel
        An enabled model, or one wrapped by PEFT.
    contexts, continuations : sequence of 1-D tensors, arrays or lists of int
        Token ids, at least one per sequence.
    max_batch_tokens : int
        Maximum number of tokens per forward pass, and of tokens in the KV cache besides one row. Cached tokens that are
        computed again for their logits are not split.
    softmax_dtype : torch.dtype, optional
        Dtype of the log-softmax. Default: float32, or the logits' dtype if that is more precise.
    stats : GenerationStats, optional
        Receives the cost of the call. `kv_bytes` is the maximum over batches.
    on_scored : callable, optional
        Called with the index and score of each row, batch by batch.

    Returns
    -------
    list of (float, bool)
        Per row the sum of the log-probabilities of the continuation's tokens, and whether all of them are the most
        likely ones.

    Raises
    ------
    ValueError
        If the model is not enabled, if the numbers of contexts and continuations differ, if one is empty or holds ids
        outside the vocabulary, or if `max_batch_tokens` is less than 1.
    UnsupportedModelError
        If a row exceeds the length at which the model changes its RoPE frequencies.

    Examples
    --------
    >>> hf_parallel.enable(model)
    >>> prompt = tokenizer("The capital of Italy is").input_ids
    >>> choices = [tokenizer(city).input_ids for city in (" Rome", " Oslo")]
    >>> loglikelihoods(model, [prompt] * 2, choices)
    """
    inner: Any = unwrap(model)
    if not isinstance(inner, ParallelGenerationMixin):
        raise ValueError(f"{type(inner).__name__} is not enabled: call hf_parallel.enable(model) first")
    check_int("max_batch_tokens", max_batch_tokens, at_least=1)
    arguments.check_not_compiled(inner)  # type: ignore[arg-type]
    arguments.check_prepares_own_inputs(inner)  # type: ignore[arg-type]
    rows = _make_rows(inner, contexts, continuations)
    scorer = _Scorer(inner, max_batch_tokens, softmax_dtype)
    scores: dict[int, Score] = {}

    def add(index: int, score: Score) -> None:
        scores[index] = score
        if on_scored is not None:
            on_scored(index, score)

    scorer.run(rows, add)
    if stats is not None:
        stats.add(scorer.stats)
    return [scores[index] for index in range(len(rows))]


def _make_rows(
    model: Any,
    contexts: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
    continuations: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
) -> list[_Row]:
    if len(contexts) != len(continuations):
        raise ValueError(f"got {len(contexts)} contexts, but {len(continuations)} continuations")
    vocabulary, limit = vocabulary_size(model), enabled(model).capabilities.max_length
    rows = []
    for index, pair in enumerate(zip(contexts, continuations, strict=True)):
        names = (f"contexts[{index}]", f"continuations[{index}]")
        context, continuation = (_as_ids(name, ids, vocabulary) for name, ids in zip(names, pair, strict=True))
        rows.append(_Row(index, np.concatenate((context, continuation)), len(context) - 1))
        if limit is not None and len(rows[-1].inputs) > limit:
            raise UnsupportedModelError(
                f"{type(model).__name__} changes its RoPE frequencies after {limit} tokens, which would invalidate "
                f"cached keys; {names[0]} and {names[1]} may have at most {limit + 1}, got {len(rows[-1].tokens)}"
            )
    return rows


def _as_ids(name: str, tokens: Sequence[int] | np.ndarray | torch.Tensor, vocabulary: int) -> np.ndarray:
    ids = np.asarray(tokens.cpu() if isinstance(tokens, torch.Tensor) else tokens)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a 1-D tensor or list of at least one token id, got {tokens!r}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        token = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{name} holds {token}, outside the vocabulary of {vocabulary}")
    return ids.astype(np.int64)


class _Scorer:
    """One call: computes the tree of all rows, and their scores."""

    def __init__(self, model: Any, max_batch_tokens: int, softmax_dtype: torch.dtype | None) -> None:
        self.model, self.max_tokens, self.softmax_dtype = model, max_batch_tokens, softmax_dtype
        self.cache = SharedPrefixCache()
        self.stats = GenerationStats()
        self.device = execution_device(model)
        self.max_queries = max(1, MAX_LOGITS // vocabulary_size(model))

    def run(self, rows: Sequence[_Row], on_scored: Callable[[int, Score], None]) -> None:
        """Compute the scores of all rows, batch by batch."""
        claim, model = Claim(), self.model
        try:
            with ExitStack() as stack:
                for context in (torch.no_grad(), cpu_as_default(), model.claimed(claim)):
                    stack.enter_context(context)
                for context in (linear_layers(model), gradient_checkpointing_disabled(model)):
                    stack.enter_context(context)
                self.cache.claim(model, claim, kept=False)
                passes = CachedModel(model, enabled(model).capabilities, self.cache, cuda_graph=False, compile=False)
                for batch in _batches(rows, self.max_tokens):
                    self.cache.tree.retain(batch[0].inputs[: batch[0].first])
                    for row, score in zip(batch, self._score(batch, passes), strict=True):
                        on_scored(row.index, score)
        finally:
            claim.active = False

    def _score(self, rows: Sequence[_Row], passes: CachedModel) -> list[Score]:
        began = time.perf_counter()
        parts, targets = self._plan(rows)
        sums, greedy = np.zeros(len(rows)), np.ones(len(rows), dtype=bool)
        for held, log_probs, is_best in self._compute(parts, targets, passes):
            np.add.at(sums, targets.rows[held], log_probs)
            np.logical_and.at(greedy, targets.rows[held], is_best)
        stats, cache = self.stats, self.cache
        stats.reused_tokens += sum(len(row.inputs) for row in rows) - sum(part.stop - part.start for part in parts)
        stats.kv_bytes = max(stats.kv_bytes, cache.kv_bytes)
        stats.reserved_bytes = max(stats.reserved_bytes, cache.pool.arena.reserved_bytes)
        stats.prefill_seconds += time.perf_counter() - began
        return list(zip(sums.tolist(), greedy.tolist(), strict=True))

    def _plan(self, rows: Sequence[_Row]) -> tuple[list[_Part], _Targets]:
        """Insert rows into the tree. Return what must be computed, parents before children, and the targets."""
        leaves = [self.cache.insert(row.inputs) for row in rows]
        wanted: dict[Node, list[tuple[int, int, np.ndarray]]] = {}  # row, first offset in the node, targets after it
        for index, (row, leaf) in enumerate(zip(rows, leaves, strict=True)):
            start = 0
            for node in leaf.path:
                begin, end = max(row.first, start), start + len(node.tokens)
                if begin < end:
                    wanted.setdefault(node, []).append((index, begin - start, row.tokens[begin + 1 : end + 1]))
                start = end
        parts: list[_Part] = []
        whole = self.cache.pool.states.in_use  # as states are kept at the ends of nodes
        again = [
            (node, 0 if whole else min(offset for _, offset, _ in of))
            for node, of in wanted.items()
            if not len(node.uncached)
        ]
        new = [(node, 0) for node in self.cache.nodes_to_prefill()]
        for nodes, write in ((again, False), (new, True)):
            for node, skipped in nodes:
                parts.append(_Part(node, parts[-1].stop if parts else 0, skipped, write))
        places = {part.node: part.start - part.skipped for part in parts}
        found = [(index, places[node] + offset, ids) for node, of in wanted.items() for index, offset, ids in of]
        return parts, _Targets(
            rows=np.repeat([index for index, _, _ in found], [len(ids) for _, _, ids in found]),
            places=np.concatenate([place + np.arange(len(ids)) for _, place, ids in found]),
            ids=np.concatenate([ids for _, _, ids in found]),
        )

    def _compute(
        self, parts: Sequence[_Part], targets: _Targets, passes: CachedModel
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Run the forward passes. Yield, for each, indices of targets, their log-probabilities, and if they are best.

        Each array is `[targets of the pass]`.
        """
        tokens = np.concatenate([part.tokens for part in parts])
        queries = np.unique(targets.places)
        order = np.argsort(targets.places, kind="stable")
        places = targets.places[order]
        for start, stop in self._spans(parts, queries):
            keep = queries[slice(*np.searchsorted(queries, (start, stop)))]
            held = order[slice(*np.searchsorted(places, (start, stop)))]
            logits = self._forward(parts, start, stop, tokens, keep, passes)
            yield held, *self._log_probs(logits, np.searchsorted(keep, targets.places[held]), targets.ids[held])

    def _spans(self, parts: Sequence[_Part], queries: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the packed tokens `start <= i < stop` of each forward pass; tokens computed again stay together."""
        start, total = 0, parts[-1].stop
        again = [part for part in parts if not part.write]
        while start < total:
            stop = min(start + self.max_tokens, total)
            at = np.searchsorted(queries, start) + self.max_queries
            stop = min(stop, int(queries[at])) if at < len(queries) else stop
            cut = next((part for part in again if part.start < stop < part.stop), None)
            if cut is not None:
                stop = cut.start if cut.start > start else cut.stop
            yield start, stop
            start = stop

    def _forward(
        self,
        parts: Sequence[_Part],
        start: int,
        stop: int,
        tokens: np.ndarray,
        keep: np.ndarray,
        passes: CachedModel,
    ) -> torch.Tensor:
        """Return the logits `[len(keep), vocabulary]` after packed tokens of one forward pass."""
        segments = [
            Segment(part.node.view, min(stop, part.stop) - max(start, part.start), part.write)
            for part in parts
            if part.start < stop and part.stop > start
        ]
        forward = self.cache.prepare(segments)
        logits = passes.logits(forward, to_device(tokens[start:stop], self.device), (keep - start).tolist())
        self.cache.commit()
        self.stats.forward_passes += 1
        self.stats.prefilled_tokens += stop - start
        return logits

    def _log_probs(self, logits: torch.Tensor, queries: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of tokens `ids` after some of the `queries`, ascending, and if they are best."""
        dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
        chosen = [torch.zeros(0, dtype=dtype, device=logits.device)]
        best = logits.argmax(dim=-1)
        for first in range(0, len(logits), SOFTMAX_ROWS):
            log_probs = F.log_softmax(logits[first : first + SOFTMAX_ROWS], dim=-1, dtype=dtype)
            inside = slice(*np.searchsorted(queries, (first, first + SOFTMAX_ROWS)))
            rows = to_device(queries[inside] - first, logits.device)
            chosen.append(log_probs[rows, to_device(ids[inside], logits.device)])
        is_best = best.cpu().numpy()[queries] == ids
        return torch.cat(chosen).cpu().double().numpy(), is_best


def _batches(rows: Sequence[_Row], max_tokens: int) -> Iterator[list[_Row]]:
    """Yield rows in the order of their tokens, in batches with at most `max_tokens` new tokens each, or one row."""
    batch: list[_Row] = []
    held, before = 0, np.empty(0, np.int64)
    for row in sorted(rows, key=lambda row: row.inputs.astype(">u4").tobytes()):
        new = len(row.inputs) - common_prefix(before, row.inputs)
        if batch and held + new > max_tokens:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held, before = held + new, row.inputs
    if batch:
        yield batch
