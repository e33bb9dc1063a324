"""Incremental detokenization: text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens decoded again before the new ones, as spaces and merged characters depend on them
_MAX_INCOMPLETE = 3  # tokens held back until a character is complete: it has at most four bytes, a token at least one
_REPLACEMENT = "\ufffd"  # decoded from bytes that form no character, or no complete one


class IncrementalDetokenizer:
    """Decodes a growing sequence of tokens; each token is decoded O(1) times.

    Special tokens are kept. A character whose bytes are incomplete is held back for at most three tokens. tokenizers'
    `DecodeStream` does not fit: it raises on tokenizers with byte fallback, holds back invalid bytes without limit, and
    needs a fast tokenizer. `text` is the text of `tokens` without what is held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text = ""
        self._num_decoded = 0  # tokens that `text` covers

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens. Return the text that they add."""
        self.tokens += tokens
        start, oldest = max(self._num_decoded - _CONTEXT, 0), len(self.tokens) - _MAX_INCOMPLETE
        before = self._decode(self.tokens[start : self._num_decoded])
        for end in range(len(self.tokens), self._num_decoded, -1):
            after = self._decode(self.tokens[start:end])
            complete = after.startswith(before) and not after.endswith(_REPLACEMENT)
            if complete or end <= oldest:
                self._num_decoded, added = end, after[len(before) :]
                self.text += added
                return added
        return ""

    def flush(self) -> str:
        """Return the text of the tokens that are held back, as no others follow."""
        start = max(self._num_decoded - _CONTEXT, 0)
        before = self._decode(self.tokens[start : self._num_decoded])
        added = self._decode(self.tokens[start:])[len(before) :]
        self._num_decoded, self.text = len(self.tokens), self.text + added
        return added

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `ValueError` unless `tokenizer` has the interface of a tokenizer of transformers."""
    if isinstance(tokenizer, type) or not callable(tokenizer) or not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer must be a tokenizer that encodes when called and has decode(), got {tokenizer!r}")
