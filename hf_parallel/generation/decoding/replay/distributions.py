"""DistributionCache: sampling distributions, cached beside the logits of their nodes (Hive, section 6.3)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.logits_trie import CachedDistribution, CachedLogits, TrieNode
from hf_parallel.generation.sampling.processors import MinLengthProcessor
from hf_parallel.generation.sampling.rng import Candidates
from hf_parallel.generation.sampling.sampler import Sampler

HOST = ("cpu",)
"""Device types from which a distribution is cached at once; on others this would wait for a copy at every step."""
_TRUNCATING = ("EpsilonLogitsWarper", "MinPLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
"""Processors of Transformers that leave few tokens and cost more than sampling one.

Not `eta_cutoff` and `typical_p`: they sum over the vocabulary, and rounding depends on the number of rows.
"""

_PURE = (
    *_TRUNCATING,
    *("InfNanRemoveLogitsProcessor", "LogitNormalization", "TemperatureLogitsWarper"),
    MinLengthProcessor.__name__,
)
"""Processors that depend on the logits and the number of tokens alone."""


class DistributionCache:
    """Sampling distributions of one call, computed once and then stored in the trie for later replays.

    Stores distributions over few tokens (`top_k`, `top_p` and the like), if the call's processors depend on logits and
    length alone. Others are not worth storing: a softmax takes less time than sampling, and its result as much memory
    as the logits. `settings` describes all else that distributions depend on: the device and the processors.
    """

    def __init__(self, cache: LogitsCache, sampler: Sampler) -> None:
        self.cache = cache
        self.sampler = sampler
        self._device = sampler.table.device
        processors = sampler.processors
        names = [_name(processor) for processor in processors]
        returns_scores = sampler.scores is not None or sampler.logits is not None
        is_pure = all(name in _PURE for name in names) and not returns_scores
        self.enabled = sampler.do_sample and is_pure and any(name in _TRUNCATING for name in names)
        self.settings = repr((str(self._device), [_describe(processor) for processor in processors]))
        self._min_lengths = [p.min_length for p in processors if isinstance(p, MinLengthProcessor)]
        # Interned, as every node holds a reference.
        may_end = itertools.product((False, True), repeat=len(self._min_lengths))
        self._keys = {flags: sys.intern(f"{self.settings} {flags}") for flags in may_end}

    def compute(self, rows: Sequence[int], nodes: Sequence[TrieNode]) -> torch.Tensor:
        """Return the distributions of rows at their nodes, cached where possible; see `Sampler.distribution`."""
        lengths = [self.sampler.table.lengths[row] for row in rows]
        cached = [self.find(node, length) for node, length in zip(nodes, lengths, strict=True)]
        new = [i for i, distribution in enumerate(cached) if distribution is None]
        if new:
            logits = torch.stack([dense(nodes[i]) for i in new])
            computed = self.sampler.distribution([rows[i] for i in new], logits)
            for i, probs in zip(new, computed, strict=True):
                self.store(nodes[i], lengths[i], probs)
            if len(new) == len(rows):
                return computed
        vocabulary = next(node.logits.vocabulary for node in nodes if node.logits is not None)
        combined = torch.zeros(len(rows), vocabulary, device=self._device)
        if new:
            combined[new] = computed
        for probs, distribution in zip(combined, cached, strict=True):
            if distribution is not None:
                distribution.fill(probs)
        return combined

    def candidates(self, rows: Sequence[int], nodes: Sequence[TrieNode]) -> list[Candidates] | None:
        """Return the tokens of non-zero probability of each row, if all are cached and can be drawn from."""
        if not self.enabled or self._device.type not in HOST or self.sampler.rngs is None:
            return None
        candidates = []
        for row, node in zip(rows, nodes, strict=True):
            distribution = self.find(node, self.sampler.table.lengths[row])
            if distribution is None:
                return None
            candidates.append((distribution.ids, distribution.probs))
        return candidates

    def store_new(self, rows: Sequence[int], nodes: Sequence[TrieNode], probs: torch.Tensor) -> None:
        """Store distributions `[len(rows), vocabulary]` of nodes that the model has just computed, if on the CPU."""
        if self.enabled and self._device.type in HOST:
            for row, node, row_probs in zip(rows, nodes, probs, strict=True):
                length = self.sampler.table.lengths[row]
                if self.find(node, length) is None:
                    self.store(node, length, row_probs)

    def find(self, node: TrieNode, length: int) -> CachedDistribution | None:
        """Return the distribution of a node for a row of `length` tokens, if computed under the call's settings."""
        cached = node.distribution if self.enabled else None
        return cached if cached is not None and cached.settings == self._key(length) else None

    def store(self, node: TrieNode, length: int, probs: torch.Tensor) -> None:
        """Store probabilities `[vocabulary]` if memory suffices, and only few are non-zero."""
        distribution = CachedDistribution.from_probs(probs, self._key(length)) if self.enabled else None
        if distribution is not None:
            self.cache.store_distribution(node, distribution)

    def precompute(self, node: TrieNode, logits: CachedLogits, length: int) -> None:
        """Compute and store the distribution of a node, unless it is stored. Thread-safe."""
        if self.enabled and self.find(node, length) is None:
            self.store(node, length, self.sampler.distribution_ahead(logits.to_dense(), length))

    def _key(self, length: int) -> str:
        return self._keys[tuple(length >= minimum for minimum in self._min_lengths)]


def dense(node: TrieNode) -> torch.Tensor:
    """Return the cached logits of a node, `[vocabulary]`."""
    assert node.logits is not None, "the rows' logits are cached"
    return node.logits.to_dense()


def _name(processor: LogitsProcessor) -> str:
    """Return the class name of a processor of Transformers or a `MinLengthProcessor`; for others an empty string."""
    kind = type(processor)
    is_known = kind is MinLengthProcessor or kind.__module__ == "transformers.generation.logits_process"
    return kind.__name__ if is_known else ""


def _describe(processor: LogitsProcessor) -> tuple[object, ...]:
    """Return a processor's class and settings; for an unknown class the class alone."""
    name = _name(processor)
    if not name:
        return (type(processor).__module__, type(processor).__qualname__)
    settings = processor.settings if isinstance(processor, MinLengthProcessor) else vars(processor)
    values = []
    for key, value in settings.items():
        values.append((key, value.tolist() if isinstance(value, torch.Tensor) else value))
    return name, sorted(values)
