"""DraftSampler: what a row would draw if what comes next were as likely as it was somewhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_parallel.cache.logits import TrieNode
from hf_parallel.generation.resampling.prefetch import DistributionCache
from hf_parallel.generation.rng import draw_among
from hf_parallel.generation.sampling import Sampler

MOST_LIKELY = 8
"""Tokens of a state that are looked at; others are hardly ever drawn where a guess is any good."""


@dataclass(eq=False)
class DraftSampler:
    """Draws ahead from what is remembered of states, for `NgramDrafter`; no row moves by it.

    A guess, not a sample: of the processors only the temperature counts, unless what they leave of a state is kept.

    Parameters
    ----------
    sampler : Sampler
        Its rows have noise of their own.
    distributions : DistributionCache
    temperature : float
    """

    sampler: Sampler
    distributions: DistributionCache
    temperature: float
    _likely: dict[TrieNode, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __call__(self, row: int, state: TrieNode, ahead: int) -> int | None:
        """The token that a row would draw `ahead` tokens from here; None where nothing is known of the state."""
        noise = self.sampler.noise
        assert noise is not None, "asked only where rows have noise of their own"
        likely = self._likely.get(state) or self._look_at(state)
        return None if likely is None else draw_among(*likely, noise[row].key(ahead))

    def _look_at(self, state: TrieNode) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The likeliest tokens behind a state, int64, and their shares, float32, up to a factor."""
        kept, logits = self.distributions.similar(state), state.logits
        if kept is not None:
            shares, places = kept.shares.topk(min(MOST_LIKELY, len(kept.shares)))
            ids = kept.ids[places].long()
        elif logits is not None and len(logits.values):
            highest, ids = logits.values.topk(min(MOST_LIKELY, len(logits.values)))
            shares = ((highest.float() - highest[0].float()) / self.temperature).exp()
            ids = ids if logits.ids is None else logits.ids[ids].long()
        else:
            return None
        self._likely[state] = ids, shares
        return ids, shares
