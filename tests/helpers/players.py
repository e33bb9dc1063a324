"""Player: a logits processor in place of a model that writes given text."""

from __future__ import annotations

from collections import defaultdict

import tiny
import torch
from transformers import LogitsProcessor


class Player(LogitsProcessor):
    """Lets each row write what follows its text. Where texts differ after the same beginning, rows take them in order.

    A tiny model has one token per ASCII character. A row without a text writes the end-of-sequence token.
    """

    def __init__(self) -> None:
        self.following: dict[str, list[str]] = defaultdict(list)

    def add(self, begun: str, text: str) -> str:
        """Let a row that has written `begun` continue with a text. Return both."""
        for character in text:
            self.following[begun].append(character)
            begun += character
        return begun

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        played, seen = torch.full_like(scores, -100.0), defaultdict(int)
        for row, tokens in enumerate(input_ids.tolist()):
            text = "".join(map(chr, tokens)).strip(chr(tiny.PAD))
            options = self.following.get(text, [chr(tiny.EOS)])
            played[row, ord(options[seen[text] % len(options)])] = 100.0
            seen[text] += 1
        return played
