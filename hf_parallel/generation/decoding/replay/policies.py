"""Replay policies: which steps of a cached continuation are sampled again when it is replayed (Hive, 6.1, 6.2).

Subclassing `ReplayPolicy` with a `name` registers a policy, so that `replay="name"` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hf_parallel.cache.logits_trie import CachedLogits, TrieNode
from hf_parallel.generation.validation import is_int

_MIN_LOGIT = -1000.0  # relative to the highest logit; the probability underflows to 0 in float64
POLICIES: dict[str, type[ReplayPolicy]] = {}  # by name


class ReplayPolicy:
    """Chooses the replayed steps at which a token is sampled; at the others the cached token is kept.

    Replay follows the branch of a sampled token if the cache has one; otherwise it ends.
    """

    name: ClassVar[str] = ""
    looks_ahead: ClassVar[bool] = True
    """Whether `draws` must be called; False for a policy that samples every token."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            POLICIES[cls.name] = cls

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        """Return at which steps of a cached continuation a token is sampled, `bool [n]`.

        `uncertainty`, `float64 [n]`, is `entropy * (1 - top-1 probability)` of each step, see `uncertainty_of`; `start`
        is the number of steps that the row replayed before the first of them.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Stepwise(ReplayPolicy):
    """Samples every token, so that samples follow the model's own distribution (Hive, section 6.1)."""

    name: ClassVar[str] = "stepwise"
    looks_ahead: ClassVar[bool] = False

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        return np.ones(len(uncertainty), dtype=bool)


@dataclass(frozen=True)
class Hotspot(ReplayPolicy):
    """Samples tokens at hotspots only and keeps the cached ones elsewhere (Hive, section 6.2). Not lossless.

    The score of step t is `s_t = H_t * (1 - c_t) * decay^t` with the entropy `H_t` and the top-1 probability `c_t` of
    the model's own distribution (Hive, eq. 2 to 4; t counts from the start of the replay).

    Parameters
    ----------
    threshold : float
        Steps with a higher score are hotspots. Hive's evaluation uses 0.6.
    top_k : int, optional
        Instead of the threshold: the `top_k` steps with the highest scores are hotspots.
    decay : float
        A value below 1 favors early steps, which affect more of the following tokens.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """

    name: ClassVar[str] = "hotspot"

    threshold: float = 0.6
    top_k: int | None = None
    decay: float = 0.999

    def __post_init__(self) -> None:
        if self.top_k is not None and (not is_int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be a positive int or None, got {self.top_k!r}")
        for name, value, high in (("threshold", self.threshold, np.inf), ("decay", self.decay, 1.0)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= high:
                raise ValueError(f"{name} must be a number from 0 to {high}, got {value!r}")

    def scores(self, uncertainty: np.ndarray, start: int = 0) -> np.ndarray:
        """Return the scores `float64 [n]` of steps (Hive, eq. 4)."""
        return uncertainty * self.decay ** (start + np.arange(len(uncertainty)))

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        scores = self.scores(uncertainty, start)
        if self.top_k is None:
            return scores > self.threshold
        chosen = np.zeros(len(scores), dtype=bool)
        chosen[np.argsort(-scores, kind="stable")[: self.top_k]] = True
        return chosen


def uncertainty_of(logits: torch.Tensor) -> float:
    """Return `H * (1 - c)` of logits `[vocabulary]`: entropy in nats, top-1 probability (Hive, eq. 2 and 3)."""
    # In NumPy, as waking a second thread takes longer than the work; NumPy has no bfloat16.
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.double()
    values = logits.detach().cpu().numpy().astype(np.float64)
    shifted = np.maximum(values - values.max(), _MIN_LOGIT)  # finite, as 0 * -inf is not a number
    probs = np.exp(shifted)
    total = probs.sum()
    entropy = np.log(total) - (probs * shifted).sum() / total
    return float(entropy * (1 - 1 / total))


def uncertainty_at(node: TrieNode, logits: CachedLogits) -> float:
    """Return `uncertainty_of` a node's logits, computed once."""
    if node.uncertainty is None:
        node.uncertainty = uncertainty_of(logits.to_dense())
    return node.uncertainty


def make_policy(replay: object) -> ReplayPolicy:
    """Return the policy of a name; return a policy unchanged."""
    if isinstance(replay, ReplayPolicy):
        return replay
    if not isinstance(replay, str) or replay not in POLICIES:
        raise ValueError(f"replay must be one of {sorted(POLICIES)} or a ReplayPolicy, got {replay!r}")
    return POLICIES[replay]()
