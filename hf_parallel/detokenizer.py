"""Incremental detokenization: text that grows token by token. Also the bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_CONTEXT = 6  # tokens decoded again before the new ones, as spaces and merged characters depend on them
_MAX_CONTEXT = 4 * _CONTEXT  # if no characters are complete
_MAX_INCOMPLETE = 3  # tokens held back until a character is complete: it has at most four bytes, a token at least one
_REPLACEMENT = "\ufffd"  # decoded from bytes that form no character, or no complete one
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a SentencePiece byte-fallback token."""
_BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}


class IncrementalDetokenizer:
    """Decodes a growing sequence of tokens; each token is decoded O(1) times.

    Special tokens are kept. A character whose bytes are incomplete is held back for at most three tokens. tokenizers'
    `DecodeStream` does not fit: it raises on tokenizers with byte fallback, holds back invalid bytes without limit, and
    needs a fast tokenizer. `text` is the text of `tokens` without what is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text = ""
        self._num_decoded = 0  # tokens that `text` covers
        self._starts = [0]  # where decoding may begin: within a character of several byte tokens it would fail

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens. Return the text that they add."""
        self.tokens += tokens
        start, oldest = self._start(), len(self.tokens) - _MAX_INCOMPLETE
        before = _decode(self.tokenizer, self.tokens[start : self._num_decoded])
        for end in range(len(self.tokens), self._num_decoded, -1):
            after = _decode(self.tokenizer, self.tokens[start:end])
            complete = after.startswith(before) and not after.endswith(_REPLACEMENT)
            if complete or end <= oldest:
                self._num_decoded, added = end, after[len(before) :]
                if complete or end - self._starts[-1] > _MAX_CONTEXT:
                    self._starts.append(end)
                self.text += added
                return added
        return ""

    def flush(self) -> str:
        """Return the text of the tokens that are held back, as no others follow."""
        start = self._start()
        before = _decode(self.tokenizer, self.tokens[start : self._num_decoded])
        added = _decode(self.tokenizer, self.tokens[start:])[len(before) :]
        self._num_decoded, self.text = len(self.tokens), self.text + added
        return added

    def _start(self) -> int:
        """Return the last place at least `_CONTEXT` tokens back where a character begins, or 0."""
        while len(self._starts) > 1 and self._starts[1] <= self._num_decoded - _CONTEXT:
            del self._starts[0]
        return self._starts[0]


def token_bytes(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], before: Sequence[int]) -> list[bytes]:
    """Return the bytes that each token adds to the text of the tokens `before`, which end with a complete character.

    Decoders drop the leading space of a first token. A token that the tokenizer lacks has no bytes.
    """
    tokens = list(tokens)
    start = _decode(tokenizer, before)
    decoded = [_decode(tokenizer, [*before, token]) for token in tokens]
    added = [text[len(start) :] if text.startswith(start) else "" for text in decoded]
    return [
        _fragment(tokenizer, token, text) if _REPLACEMENT in text else text.encode(errors="ignore")
        for token, text in zip(tokens, added, strict=True)
    ]


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Any, **options: bool) -> str:
    """Return the text of one sequence `[length]`; `tokenizer.decode` also takes several, and its type says so."""
    return tokenizer.decode(tokens, **options)  # type: ignore[return-value]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return decode(tokenizer, tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _fragment(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token that is part of a character, from its name in the vocabulary; `text` is decoded."""
    name = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else ""
    if isinstance(name, bytes):
        return name
    fallback = _BYTE_FALLBACK.fullmatch(name)
    if fallback:
        return bytes([int(fallback[1], 16)])
    return bytes(_BYTE_LEVEL[c] for c in name) if all(c in _BYTE_LEVEL for c in name) else text.encode()


def check_tokenizer(tokenizer: object) -> None:
    """Raise `ValueError` unless `tokenizer` has the interface of a tokenizer of transformers."""
    if isinstance(tokenizer, type) or not callable(tokenizer) or not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer must be a tokenizer that encodes when called and has decode(), got {tokenizer!r}")
