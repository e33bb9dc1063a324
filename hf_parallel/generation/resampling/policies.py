"""Policies: which steps of a remembered continuation are sampled anew when its state is visited again (Hive, 6.1, 6.2).

A policy is a small class with a `name`; deriving from `ReplayPolicy` registers it, so that `replay="name"` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_parallel.cache.cached_logits import CachedLogits
from hf_parallel.cache.logits import TrieNode
from hf_parallel.generation.config import is_int

_NO_SHARE = -1000.0
"""A logit that is so much lower than the highest has a share of 0 in float64."""

POLICIES: dict[str, type[ReplayPolicy]] = {}
"""The policies by name."""


class ReplayPolicy:
    """Says at which remembered steps a token is drawn; at the others the remembered token is taken as it is.

    A drawn token that was taken here before leads to what followed it then; any other ends the replay.
    """

    name: ClassVar[str] = ""
    looks_ahead: ClassVar[bool] = True
    """Whether `draws` must be asked; a policy that draws every token spares that."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            POLICIES[cls.name] = cls

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        """Choose among the steps along a remembered continuation.

        Parameters
        ----------
        uncertainty : float64 [n]
            `entropy * (1 - top-1 probability)` of each step, see `uncertainty_of`.
        start : int
            Steps that were replayed before the first of them.

        Returns
        -------
        bool [n]
            True where a token is drawn.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Stepwise(ReplayPolicy):
    """Every token is drawn: the distribution of the samples is the model's own (Hive, section 6.1)."""

    name: ClassVar[str] = "stepwise"
    looks_ahead: ClassVar[bool] = False

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        """See `ReplayPolicy.draws`."""
        return np.ones(len(uncertainty), dtype=bool)


@dataclass(frozen=True)
class Hotspot(ReplayPolicy):
    """Tokens are drawn at hotspots only (Hive, section 6.2). Not lossless: elsewhere the remembered token stays.

    The score of step t is `s_t = H_t * (1 - c_t) * decay^t` with the entropy `H_t` and the top-1 probability `c_t` of
    the model's own distribution (Hive, eq. 2 to 4; t counts from the state at which the replay began).

    Parameters
    ----------
    threshold : float
        Steps with a higher score are hotspots. Hive's evaluation takes 0.6.
    top_k : int, optional
        Instead: the `top_k` steps with the highest scores.
    decay : float
        Below 1, it prefers early steps, whose change moves more of what follows.
    """

    name: ClassVar[str] = "hotspot"

    threshold: float = 0.6
    top_k: int | None = None
    decay: float = 0.999

    def __post_init__(self) -> None:
        if self.top_k is not None and (not is_int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be a positive int or None, got {self.top_k!r}")
        for name, value, high in (("threshold", self.threshold, np.inf), ("decay", self.decay, 1.0)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
                raise ValueError(f"{name} must be a number from 0 to {high}, got {value!r}")

    def scores(self, uncertainty: np.ndarray, start: int = 0) -> np.ndarray:
        """Scores `float64 [n]` of steps (Hive, eq. 4)."""
        return uncertainty * self.decay ** (start + np.arange(len(uncertainty)))

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        """See `ReplayPolicy.draws`."""
        scores = self.scores(uncertainty, start)
        if self.top_k is None:
            return scores > self.threshold
        chosen = np.zeros(len(scores), dtype=bool)
        chosen[np.argsort(-scores, kind="stable")[: self.top_k]] = True
        return chosen


def uncertainty_of(logits: torch.Tensor) -> float:
    """`H * (1 - c)` of logits `[vocabulary]`: entropy in nats and top-1 probability (Hive, eq. 2 and 3)."""
    # In NumPy: waking a second thread takes longer than the work. It does not read bfloat16.
    is_read = logits.dtype in (torch.float32, torch.float64)
    values = (logits if is_read else logits.double()).detach().cpu().numpy().astype(np.float64)
    below = np.maximum(values - values.max(), _NO_SHARE)  # a share of nothing times minus infinity is nothing
    shares = np.exp(below)
    total = shares.sum()
    entropy = np.log(total) - (shares * below).sum() / total
    return float(entropy * (1 - 1 / total))


def uncertainty_at(state: TrieNode, logits: CachedLogits) -> float:
    """`uncertainty_of` the logits of a state; worked out once."""
    if state.uncertainty is None:
        state.uncertainty = uncertainty_of(logits.spread())
    return state.uncertainty


def make_policy(replay: Any) -> ReplayPolicy:
    """The policy of a name, or the one given.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if isinstance(replay, ReplayPolicy):
        return replay
    if not isinstance(replay, str) or replay not in POLICIES:
        raise ValueError(f"replay must be one of {sorted(POLICIES)} or a ReplayPolicy, got {replay!r}")
    return POLICIES[replay]()
