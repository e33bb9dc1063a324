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

from hf_parallel.cache.placement import cpu_as_default, execution_device
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import common_prefix
from hf_parallel.generation import arguments
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.decoding.scoring import MAX_LOGITS, TreeScores
from hf_parallel.generation.enabled import Claim, enabled
from hf_parallel.generation.mixin import ParallelGenerationMixin, unwrap
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.validation import check_int
from hf_parallel.kernels import to_device
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.decode.cached_model import PREFILL_CHUNK, CachedModel
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.modules import gradient_checkpointing_disabled

Score = tuple[float, bool]
"""Log-likelihood of a continuation, and whether greedy decoding would generate it."""


@dataclass(frozen=True, eq=False)
class _ScoredRow:
    """A context with its continuation."""

    index: int  # among the arguments
    tokens: np.ndarray  # int64 [length]
    first: int  # index of the token whose logits predict the continuation's first one

    @property
    def inputs(self) -> np.ndarray:
        """Tokens that the model reads: all but the last."""
        return self.tokens[:-1]


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
        Maximum number of tokens per forward pass, and of tokens in the KV cache besides one row.
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

    scorer.score(rows, add)
    if stats is not None:
        stats.add(scorer.stats)
    return [scores[index] for index in range(len(rows))]


def _make_rows(
    model: Any,
    contexts: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
    continuations: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
) -> list[_ScoredRow]:
    if len(contexts) != len(continuations):
        raise ValueError(f"got {len(contexts)} contexts, but {len(continuations)} continuations")
    vocabulary = vocabulary_size(model)
    limit = enabled(model).capabilities.max_length
    rows = []
    for index, pair in enumerate(zip(contexts, continuations, strict=True)):
        context_name = f"contexts[{index}]"
        continuation_name = f"continuations[{index}]"
        context = _as_ids(context_name, pair[0], vocabulary)
        continuation = _as_ids(continuation_name, pair[1], vocabulary)
        row = _ScoredRow(index, np.concatenate((context, continuation)), len(context) - 1)
        if limit is not None and len(row.inputs) > limit:
            raise UnsupportedModelError(
                f"{type(model).__name__} changes its RoPE frequencies after {limit} tokens, which would invalidate "
                f"cached keys; {context_name} and {continuation_name} may have at most {limit + 1}, "
                f"got {len(row.tokens)}"
            )
        rows.append(row)
    return rows


def _as_ids(name: str, tokens: Sequence[int] | np.ndarray | torch.Tensor, vocabulary: int) -> np.ndarray:
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.cpu()
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a 1-D tensor or list of at least one token id, got {tokens!r}")
    least = ids.min()
    most = ids.max()
    if least < 0 or most >= vocabulary:
        token = least if least < 0 else most
        raise ValueError(f"{name} holds {token}, outside the vocabulary of {vocabulary}")
    return ids.astype(np.int64)


class _Scorer:
    """One call: computes the tree of all rows, and their scores."""

    def __init__(self, model: Any, max_batch_tokens: int, softmax_dtype: torch.dtype | None) -> None:
        self.model = model
        self.softmax_dtype = softmax_dtype
        self.max_tokens = max(1, min(max_batch_tokens, MAX_LOGITS // vocabulary_size(model)))
        self.cache = SharedPrefixCache()
        self.stats = GenerationStats()
        self.device = execution_device(model)

    def score(self, rows: Sequence[_ScoredRow], on_scored: Callable[[int, Score], None]) -> None:
        """Compute the scores of all rows, batch by batch."""
        claim = Claim()
        model = self.model
        try:
            with ExitStack() as stack:
                for context in (torch.no_grad(), cpu_as_default(), model.claimed(claim)):
                    stack.enter_context(context)
                for context in (fast_layers(model), gradient_checkpointing_disabled(model)):
                    stack.enter_context(context)
                self.cache.begin_call(model, claim, kept=False)
                cached_model = CachedModel(
                    model, enabled(model).capabilities, self.cache, cuda_graph=False, compile=False
                )
                for batch in _batches(rows, self.max_tokens):
                    self._keep_shared(batch)
                    for row, score in zip(batch, self._score_batch(batch, cached_model), strict=True):
                        on_scored(row.index, score)
        finally:
            claim.active = False

    def _keep_shared(self, batch: Sequence[_ScoredRow]) -> None:
        """Keep the cached prefix of a batch up to the first token whose logits it needs, and nothing else."""
        inputs = batch[0].inputs
        first_logits = [row.first for row in batch if common_prefix(inputs, row.inputs) > row.first]
        self.cache.tree.retain(inputs[: min(first_logits)])

    def _score_batch(self, rows: Sequence[_ScoredRow], cached_model: CachedModel) -> list[Score]:
        began = time.perf_counter()
        stats = self.stats
        cache = self.cache
        already_prefilled = stats.prefilled_tokens

        leaves = [cache.insert(row.inputs) for row in rows]
        asked = [(row.tokens, row.first) for row in rows]
        scores = TreeScores(cache, asked, leaves, self._log_probs, self.max_tokens)
        for segments, tokens, keep in scores.passes():
            planned = cache.prepare(segments)
            logits = cached_model.logits(planned, to_device(tokens, self.device), keep.tolist())
            cache.commit()
            stats.forward_passes += 1
            stats.prefilled_tokens += len(tokens)
            scores.add(logits)
        new_tokens = stats.prefilled_tokens - already_prefilled
        stats.reused_tokens += sum(len(row.inputs) for row in rows) - new_tokens
        stats.kv_bytes = max(stats.kv_bytes, cache.kv_bytes)
        stats.reserved_bytes = max(stats.reserved_bytes, cache.pool.arena.reserved_bytes)
        stats.prefill_seconds += time.perf_counter() - began
        sums = []
        for log_probs, is_best in scores.result():
            sums.append((float(log_probs.sum()), bool(is_best.all())))
        return sums

    def _log_probs(self, logits: torch.Tensor, queries: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of tokens `ids` after tokens `queries` of a pass, and if they are the best."""
        dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
        rows = to_device(queries, logits.device)
        chosen = to_device(ids, logits.device)
        log_probs = F.log_softmax(logits, dim=-1, dtype=dtype)[rows, chosen]
        is_best = logits.argmax(dim=-1)[rows] == chosen
        return log_probs.cpu().double().numpy(), is_best.cpu().numpy()


def _batches(rows: Sequence[_ScoredRow], max_tokens: int) -> Iterator[list[_ScoredRow]]:
    """Yield rows in the order of their tokens, in batches with at most `max_tokens` new tokens each, or one row."""
    batch: list[_ScoredRow] = []
    batch_tokens = 0
    previous = np.empty(0, np.int64)
    for row in sorted(rows, key=lambda row: row.inputs.astype(">u4").tobytes()):
        new_tokens = len(row.inputs) - common_prefix(previous, row.inputs)
        if batch and batch_tokens + new_tokens > max_tokens:
            yield batch
            batch = []
            batch_tokens = 0
        batch.append(row)
        batch_tokens += new_tokens
        previous = row.inputs
    if batch:
        yield batch
