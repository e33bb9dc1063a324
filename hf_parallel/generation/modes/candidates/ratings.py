"""Ratings: how candidates get their scores. A larger score is better."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Protocol

import torch

from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.modes.candidates.candidate import Candidate, Scorer, score_of
from hf_parallel.generation.modes.candidates.reward_model import RewardModel
from hf_parallel.generation.sampling.log_probs import TopLogProbs


class Candidates(Protocol):
    """The candidates of a call, as ratings see them."""

    loop: DecodeLoop

    def candidate(self, row: Row, mean_log_prob: float) -> Candidate:
        """Return a candidate as scorers receive it."""

    def prompt_tokens(self, row: Row) -> list[int]:
        """Return the token ids of a candidate's prompt."""


class Rating:
    """A way to score candidates."""

    collector: TopLogProbs | None = None
    """Collects the most probable tokens of each step, if the rating needs them."""

    def rate(self, candidates: Candidates, rows: Sequence[Row]) -> list[float]:
        """Return the scores of rows."""
        raise NotImplementedError


class MeanLogProb(Rating):
    """The mean log-probability of the tokens under the model."""

    def rate(self, candidates: Candidates, rows: Sequence[Row]) -> list[float]:
        return candidates.loop.log_probs(rows).nanmean(dim=1).tolist()  # type: ignore[no-any-return]


class GroupConfidence(Rating):
    """Lowest group confidence (Fu et al., Deep Think with Confidence, 2025, section 3.1).

    The confidence of a token is the negative mean log-probability of the `COLLECTED` most probable tokens: large where
    the distribution is peaked. That of a group is the mean over `window` consecutive tokens. The score is the lowest
    of all groups so far, or the mean of all tokens if there are fewer.
    """

    COLLECTED = 20

    def __init__(self, window: int) -> None:
        self.window = window
        self.collector = TopLogProbs(self.COLLECTED)
        self._known: dict[int, list[float]] = {}  # confidences of the tokens of each output row, so far

    def rate(self, candidates: Candidates, rows: Sequence[Row]) -> list[float]:
        scores = []
        for row in rows:
            confidences = self._confidences(row)
            if len(confidences) > self.window:
                groups = torch.tensor(confidences, dtype=torch.float64).unfold(0, self.window, 1)
                scores.append(groups.mean(dim=1).min().item())
            else:
                scores.append(fmean(confidences))
        return scores

    def _confidences(self, row: Row) -> list[float]:
        """Return the confidence of each token that a row has sampled; an answer to a probe has none."""
        assert self.collector is not None
        confidences = self._known.setdefault(row.output_row, [])
        for index in range(len(confidences), self.collector.count(row.output_row)):
            values = [log_prob for _, log_prob in self.collector.get(row.output_row, index).top]
            confidences.append(-fmean(values))
        return confidences


class ScorerRating(Rating):
    """A function of the caller."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def rate(self, candidates: Candidates, rows: Sequence[Row]) -> list[float]:
        means = candidates.loop.log_probs(rows).nanmean(dim=1).tolist()
        scores = []
        for row, mean in zip(rows, means, strict=True):
            scores.append(score_of(self.scorer, candidates.candidate(row, mean)))
        return scores


class ModelRating(Rating):
    """The rewards of a reward model, which reads the tokens of a prompt and its candidates over a shared prefix."""

    def __init__(self, model: Any) -> None:
        self.model = model if isinstance(model, RewardModel) else RewardModel(model)
        self.model.reset()

    def rate(self, candidates: Candidates, rows: Sequence[Row]) -> list[float]:
        sequences = []
        for row in rows:
            sequences.append(candidates.prompt_tokens(row) + candidates.loop.new_tokens(row))
        return self.model.rewards(sequences)
