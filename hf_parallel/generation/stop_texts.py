"""Stop texts: a criterion that ends a row at one, and a filter that removes it from the row's text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

_CONTEXT = 6
"""Tokens decoded before those that can hold a stop text, as spaces and merged characters depend on them."""


class StopTexts(StoppingCriteria):
    """Ends a row when its new text contains a stop text.

    transformers' `StopStringCriteria` first compares each stop text with the whole vocabulary, which takes seconds.
    """

    keeps_rows = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], begin: int) -> None:
        self.tokenizer, self.stops, self.begin = tokenizer, stops, begin
        self._length = max(len(stop.encode()) for stop in stops) + _CONTEXT  # a token has at least one byte

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: object) -> torch.Tensor:
        """Return whether rows `input_ids`, int64 `[rows, length]`, end: bool `[rows]`."""
        recent = input_ids[:, max(self.begin, input_ids.shape[1] - self._length) :].tolist()
        texts = [self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in recent]
        ended = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


class StopFilter:
    """Cuts a growing text before its first stop text. Holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.stopped = stops, False
        self._held = ""

    def add(self, text: str) -> str:
        """Append text. Return what can be shown."""
        if self.stopped:
            return ""
        held = self._held + text
        if found := [index for stop in self.stops if (index := held.find(stop)) >= 0]:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        length = max((_overlap(held, stop) for stop in self.stops), default=0)
        self._held = held[len(held) - length :]
        return held[: len(held) - length]

    def flush(self) -> str:
        """Return what was held back, as the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
