"""Text of tokens as bytes, since a token may be only a part of a character, and a marker only a part of a token."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import special_tokens, token_bytes
from hf_parallel.generation.arguments import encode

WHITESPACE = b" \t\n\r\v\f"
"""Bytes that may separate the parts of a parallel block."""


class Vocabulary:
    """Tokens of a tokenizer as bytes.

    `texts` holds the text that each token adds to a preceding one, empty where that is unknown; `special` holds the
    special tokens, such as end-of-sequence. `state` changes when tokens are added to the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self.state = _state_of(tokenizer, size)
        self.texts = _token_texts(tokenizer, size)
        self.special = frozenset(t for t in special_tokens(tokenizer) if t < size)
        self._token_of: dict[bytes, int] = {}
        self._by_first: dict[int, list[int]] = {}
        for token, text in enumerate(self.texts):
            if text and token not in self.special:
                self._token_of.setdefault(text, token)
            for first in {text[:1], text.lstrip(WHITESPACE)[:1]} - {b""}:
                self._by_first.setdefault(first[0], []).append(token)
        for token in self.special:  # a marker may be a special token
            if self.texts[token]:
                self._token_of.setdefault(self.texts[token], token)
        self._longest = max(map(len, self._token_of), default=0)

    def __len__(self) -> int:
        return len(self.texts)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of several tokens."""
        return b"".join(self.texts[token] for token in tokens)

    def without_text(self, tokens: Iterable[int]) -> Vocabulary:
        """Return a copy in which some tokens, such as the end-of-sequence tokens, have no text."""
        empty = set(tokens)
        vocabulary = copy.copy(self)
        vocabulary.texts = [b"" if token in empty else text for token, text in enumerate(self.texts)]
        return vocabulary

    def beginning_with(self, first: int) -> Sequence[int]:
        """Return the tokens that begin with the byte `first`, optionally after whitespace."""
        return self._by_first.get(first, ())

    def encode(self, text: bytes) -> list[int] | None:
        """Return the fewest tokens whose bytes are exactly `text`, or None if there are none."""
        best: list[list[int] | None] = [[]]  # by number of bytes: the fewest tokens of the first bytes
        for end in range(1, len(text) + 1):
            fewest: list[int] | None = None
            for start in range(max(end - self._longest, 0), end):
                prefix = best[start]
                token = self._token_of.get(text[start:end])
                if prefix is None or token is None:
                    continue
                if fewest is None or len(prefix) + 1 < len(fewest):
                    fewest = [*prefix, token]
            best.append(fewest)
        return best[-1]


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, Vocabulary] = WeakKeyDictionary()


def get_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer, cached until tokens are added.

    The tokenizer is one of transformers, or any hashable object that encodes when called and has `decode`. `size` is
    the number of tokens of the model; those that the tokenizer lacks have no text.
    """
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None or vocabulary.state != _state_of(tokenizer, size):
        vocabulary = Vocabulary(tokenizer, size)
        _vocabularies[tokenizer] = vocabulary
    return vocabulary


def encode_exactly(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, text: str) -> list[int] | None:
    """Return the tokenizer's tokens of a text; if their text differs, the fewest tokens with this text, or None."""
    fewest = vocabulary.encode(text.encode())
    if fewest is None:
        return None
    tokens = encode(tokenizer, text)
    if any(not 0 <= token < len(vocabulary) for token in tokens):
        return fewest
    return tokens if vocabulary.decode(tokens) == text.encode() else fewest


class Token(NamedTuple):
    """A token of an answer. `draw`: its index among the samples of row `row` of the batch, -1 if it was not sampled."""

    id: int
    text: bytes
    draw: int = -1
    row: int = -1


def ids(tokens: Iterable[Token]) -> list[int]:
    """Return the ids of tokens."""
    return [token.id for token in tokens]


def text_of(tokens: Iterable[Token]) -> bytes:
    """Return the text of tokens."""
    return b"".join(token.text for token in tokens)


def tokens_of(text: bytes, vocabulary: Vocabulary) -> list[Token]:
    """Return the fewest tokens with a text. Raise a `ValueError` if there are none."""
    tokens = vocabulary.encode(text)
    if tokens is None:
        raise ValueError(f"no tokens have the text {text.decode(errors='replace')!r}")
    return [Token(token, vocabulary.texts[token]) for token in tokens]


def slice_tokens(tokens: Sequence[Token], vocabulary: Vocabulary, begin: int, end: int | None = None) -> list[Token]:
    """Return the tokens of the bytes from `begin` to `end`; a token that crosses a border is cut and re-encoded.

    Raise a `ValueError` if no tokens have the text of the cut token.
    """
    sliced: list[Token] = []
    start = 0
    for token in tokens:
        length = len(token.text)
        part_end = length if end is None else max(end - start, 0)
        part = token.text[max(begin - start, 0) : part_end]
        is_inside = start >= begin and (end is None or start + max(length, 1) <= end)
        if is_inside and part == token.text:
            sliced.append(token)
        elif part:
            sliced += tokens_of(part, vocabulary)
        start += length
    return sliced


def widen_span(tokens: Iterable[Token], begin: int, end: int) -> tuple[int, int]:
    """Move the borders of a span of bytes outwards to borders of tokens, across whitespace only."""
    start = 0
    for token in tokens:
        after = start + len(token.text)
        if start < begin < after and not token.text[: begin - start].strip(WHITESPACE):
            begin = start
        if start < end < after and not token.text[end - start :].strip(WHITESPACE):
            end = after
        start = after
    return begin, end


def _state_of(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[int, int, frozenset[int]]:
    """Return what changes when tokens are added to a tokenizer."""
    num_tokens = len(tokenizer) if hasattr(type(tokenizer), "__len__") else size
    return size, num_tokens, frozenset(special_tokens(tokenizer))


def _token_texts(tokenizer: PreTrainedTokenizerBase, size: int) -> list[bytes]:
    """Return the text that each token adds to a preceding one; decoders drop the leading space of a first token."""
    anchor = encode(tokenizer, "a")[-1:]
    num_tokens = size
    if hasattr(tokenizer, "get_vocab"):
        num_tokens = min(size, max(tokenizer.get_vocab().values()) + 1)
    texts = token_bytes(tokenizer, range(num_tokens), anchor)
    return texts + [b""] * (size - num_tokens)
