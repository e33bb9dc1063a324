"""Nodes of the logits trie, with cached logits and sampling probabilities of the next token."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

NODE_BYTES = 400
"""Bytes of a node besides its logits: the object and its entry in the parent's dictionary."""

TENSOR_BYTES = 800
"""Bytes of a tensor besides its values: its Python and C++ objects, and their allocations."""


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """Logits of one node, all of them or the highest.

    Kept logits are strictly higher than dropped ones, so a tie may leave fewer than `top_k`.
    """

    values: torch.Tensor  # [vocabulary] or [top_k], in the model's dtype
    ids: torch.Tensor | None  # int32 [top_k]: tokens of `values`; None if all logits are kept
    vocabulary: int
    log_tail: float  # log of the total probability of the dropped tokens at temperature 1; -inf if none was dropped

    @classmethod
    def from_logits(cls, logits: torch.Tensor, top_k: int | None) -> CachedLogits:
        """Copy logits `[vocabulary]` to the CPU, all of them or the `top_k` highest."""
        size = len(logits)
        if top_k is None or top_k >= size:
            return cls(logits.detach().to("cpu", copy=True), None, size, -np.inf)
        values, ids = logits.topk(top_k + 1)
        higher = values > values[-1]
        values, ids, wide = values[higher], ids[higher], logits.double()
        log_tail = wide.index_fill(0, ids, -torch.inf).logsumexp(0) - wide.logsumexp(0)
        return cls(values.cpu(), ids.to("cpu", torch.int32), size, float(log_tail))

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return _num_bytes(self.values) + (0 if self.ids is None else _num_bytes(self.ids))

    def covers(self, count: int, log_tail: float) -> bool:
        """Return whether all logits are kept, or at least `count` of them with a log tail of at most `log_tail`."""
        return self.ids is None or (len(self.ids) >= count and self.log_tail <= log_tail)

    @cached_property
    def log_total(self) -> float:
        """Log of the sum of the exponentials of all logits."""
        return float(self.values.double().logsumexp(-1) - np.log(-np.expm1(self.log_tail)))

    def log_prob(self, token: int) -> float:
        """Return the log-probability of a token; NaN if its logit was dropped."""
        kept = self.values[token : token + 1] if self.ids is None else self.values[self.ids == token]
        return float(kept[0]) - self.log_total if len(kept) else np.nan

    def to_dense(self) -> torch.Tensor:
        """Return logits `[vocabulary]`. Dropped tokens share their total probability equally.

        In float32 if any were dropped, as the model's dtype may be too coarse for the small probabilities.
        """
        if self.ids is None:
            return self.values
        if not len(self.ids):
            return torch.zeros(self.vocabulary)
        ids, values = self.ids.long(), self.values.double()
        each = self.log_total + self.log_tail - np.log(self.vocabulary - len(ids))
        dense = torch.full((self.vocabulary,), each, dtype=torch.float64)
        dense[ids] = values
        return dense.float()


@dataclass(frozen=True, eq=False)
class CachedDistribution:
    """Sparse probabilities of the next token under certain sampling settings."""

    settings: str  # sampling settings that the probabilities were computed with
    ids: torch.Tensor  # int32 [n], ascending
    probs: torch.Tensor  # float32 [n]; all other tokens have probability 0

    @classmethod
    def from_probs(cls, probs: torch.Tensor, settings: str) -> CachedDistribution | None:
        """Convert probabilities `float32 [vocabulary]`, or return None if that saves less than 3/4 of the memory."""
        ids = probs.nonzero()[:, 0]
        if 2 * len(ids) > len(probs) // 4:
            return None
        return cls(settings, ids.to("cpu", torch.int32), probs[ids].cpu())

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return _num_bytes(self.ids) + _num_bytes(self.probs)

    def fill(self, out: torch.Tensor) -> None:
        """Write the probabilities into `out`, zeros `[vocabulary]`."""
        out[self.ids.to(out.device, torch.int64)] = self.probs.to(out.device)

    def prob(self, token: int) -> float:
        """Return the probability of a token."""
        index = int(torch.searchsorted(self.ids, token))
        return float(self.probs[index]) if index < len(self.ids) and int(self.ids[index]) == token else 0.0


@dataclass(eq=False)
class TrieNode:
    """A token sequence: that of the parent, followed by `token`."""

    token: int
    parent_ref: weakref.ref[TrieNode] | None  # weak: a trie without reference cycles is freed at once
    children: dict[int, TrieNode] = field(default_factory=dict)
    logits: CachedLogits | None = None  # of the next token
    distribution: CachedDistribution | None = None  # of the next token, under the latest sampling settings
    uncertainty: float | None = None  # score of a replay policy
    last_used: int = 0
    pins: int = 0  # number of cursors; a pinned node is not evicted
    alive: bool = True  # False once evicted or cleared
    queued: bool = False  # whether in the eviction queue

    @property
    def parent(self) -> TrieNode | None:
        """The node of the sequence without its last token; None for a root."""
        return None if self.parent_ref is None else self.parent_ref()

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return NODE_BYTES + sum(kept.num_bytes for kept in (self.logits, self.distribution) if kept is not None)

    def delete(self) -> None:
        """Free the tensors, even if the node is referenced elsewhere; a pinned node keeps them."""
        self.alive = False
        if not self.pins:
            self.logits = self.distribution = None


def _num_bytes(tensor: torch.Tensor) -> int:
    return TENSOR_BYTES + tensor.nbytes
