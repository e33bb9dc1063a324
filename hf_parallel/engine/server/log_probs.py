"""Log-probabilities of generated tokens and of their alternatives, under the model's distribution."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, StoppingCriteria


class TokenLogProbs(NamedTuple):
    """Log-probability of a token, and the most probable tokens with theirs."""

    log_prob: float
    top: list[tuple[int, float]]


class LogProbs(LogitsProcessor):
    """Processor that computes log-probabilities and changes none. `criterion` sees which token was sampled.

    Results are stored by state, that is by the tokens of a row: rows with the same tokens have the same logits.
    """

    keeps_rows = False

    def __init__(self, top: int) -> None:
        self.top = top
        self.criterion = _Sampled(self)
        self._found: dict[int, TokenLogProbs] = {}  # by state
        self._pending: dict[int, torch.Tensor] = {}  # log-probabilities `[vocabulary]` of the next token, by state

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Store the log-probabilities of the next token, and return `scores` unchanged."""
        log_probs = scores.float().log_softmax(-1)
        self._pending |= zip(map(_state, input_ids), log_probs, strict=True)
        return scores

    def add_sampled(self, input_ids: torch.Tensor) -> None:
        """Store the result for the last token of each row, int64 `[rows, length]`."""
        states = [_state(row[:-1]) for row in input_ids]
        for row, state in zip(input_ids, states, strict=True):
            log_probs = self._pending.get(state)
            if log_probs is not None:
                values, tokens = log_probs.topk(self.top)
                alternatives = list(zip(tokens.tolist(), values.tolist(), strict=True))
                self._found[_state(row)] = TokenLogProbs(float(log_probs[row[-1]]), alternatives)
        for state in states:  # after the loop, as rows with the same tokens share it
            self._pending.pop(state, None)
        if len(self._pending) > 2 * max(len(input_ids), 64):
            self._pending.clear()

    def get(self, row: array[int]) -> TokenLogProbs | None:
        """Return the result for the last token of a row, of the type `q`, if it was sampled."""
        return self._found.get(hash(row.tobytes()))


class _Sampled(StoppingCriteria):
    keeps_rows = False

    def __init__(self, log_probs: LogProbs) -> None:
        self.log_probs = log_probs

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.log_probs.add_sampled(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _state(row: torch.Tensor) -> int:
    return hash(row.cpu().numpy().tobytes())
