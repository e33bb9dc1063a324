"""Custom processors and criteria that keep state per row of the batch, or read other rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria


class Alternate(LogitsProcessor):
    """Keeps state per row of the batch: a row must not repeat the parity of its last token."""

    def __init__(self) -> None:
        self.last: list[int] | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.last is None:
            self.last = [0] * len(input_ids)
        assert len(self.last) == len(input_ids)
        scores = scores.clone()
        for row, parity in enumerate(self.last):
            scores[row, parity::2] = float("-inf")
        self.last = [1 - parity for parity in self.last]
        return scores


class FollowOthers(LogitsProcessor):
    """Reads the whole batch: the scores of a row depend on the last tokens of the rows above it."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        shifts = input_ids[:, -1].cumsum(0).tolist()
        return torch.stack([row.roll(shift) for row, shift in zip(scores, shifts, strict=True)])  # type: ignore[return-value]


class EndRow(StoppingCriteria):
    """Keeps state per row of the batch: row `i` ends after `i + 2` steps."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.steps += 1
        return torch.tensor([self.steps >= row + 2 for row in range(len(input_ids))])  # type: ignore[return-value]
