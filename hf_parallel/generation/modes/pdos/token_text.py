"""The bytes that each token stands for, so that text can be followed, cut and spelled token by token.

Bytes, because a token may be part of a character, and a marker part of a token. Knows a tokenizer; no model, no cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from hf_parallel.generation.arguments import encode

WHITESPACE = b" \t\n\r\v\f"
"""Bytes that may stand between the parts of a parallel block."""
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece names a token that is one byte."""


class Vocabulary:
    """The tokens of a tokenizer as bytes.

    Attributes
    ----------
    state : tuple
        What the tokenizer was like when it was read.
    texts : list of bytes
        What each token adds to a text that it does not begin. Empty where a token adds none, or none that is known.
    special : frozenset of int
        Tokens that are no text, such as the end of a text.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.state = _state_of(tokenizer, size)
        self.texts = _token_texts(tokenizer, size)
        self.special = frozenset(t for t in _special_ids(tokenizer) if t < size)
        self._spelled: dict[bytes, int] = {}
        self._by_first: dict[int, list[int]] = {}
        for token, text in enumerate(self.texts):
            if text and token not in self.special:
                self._spelled.setdefault(text, token)
            for first in {text[:1], text.lstrip(WHITESPACE)[:1]} - {b""}:
                self._by_first.setdefault(first[0], []).append(token)
        for token in self.special:  # a marker may be a token of its own
            if self.texts[token]:
                self._spelled.setdefault(self.texts[token], token)
        self._longest = max(map(len, self._spelled), default=0)

    def __len__(self) -> int:
        return len(self.texts)

    def join(self, tokens: Iterable[int]) -> bytes:
        """The bytes of several tokens."""
        return b"".join(self.texts[token] for token in tokens)

    def text(self, tokens: Iterable[int]) -> str:
        """The text of several tokens; bytes that are no characters become U+FFFD."""
        return self.join(tokens).decode(errors="replace")

    def beginning_with(self, first: int) -> Sequence[int]:
        """Tokens that begin with the byte `first`, at once or behind whitespace."""
        return self._by_first.get(first, ())

    def spell(self, text: bytes) -> list[int] | None:
        """The fewest tokens that give exactly `text`, or None if none do."""
        best: list[list[int] | None] = [[]]
        for end in range(1, len(text) + 1):
            found: list[int] | None = None
            for start in range(max(end - self._longest, 0), end):
                before, token = best[start], self._spelled.get(text[start:end])
                if before is not None and token is not None and (found is None or len(before) + 1 < len(found)):
                    found = [*before, token]
            best.append(found)
        return best[-1]


_known: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any, size: int) -> Vocabulary:
    """The vocabulary of a tokenizer, made once, and anew when tokens were added.

    Parameters
    ----------
    tokenizer
        Of transformers, or any object that encodes when called and has `decode`.
    size : int
        Tokens that the model knows; those that the tokenizer does not know have no text.
    """
    try:
        found = _known.get(tokenizer)
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return Vocabulary(tokenizer, size)
    if found is None or found.state != _state_of(tokenizer, size):
        found = _known[tokenizer] = Vocabulary(tokenizer, size)
    return found


def tokens_of(tokenizer: Any, vocabulary: Vocabulary, text: str) -> list[int] | None:
    """A text as its tokenizer writes it, or in the fewest tokens where that is not the text alone; None if none do."""
    tokens = encode(tokenizer, text)
    known = all(0 <= token < len(vocabulary) for token in tokens)
    return tokens if known and vocabulary.join(tokens) == text.encode() else vocabulary.spell(text.encode())


def _state_of(tokenizer: Any, size: int) -> tuple[int, int, frozenset[int]]:
    """What changes when tokens are added to a tokenizer."""
    known = len(tokenizer) if hasattr(type(tokenizer), "__len__") else size
    return size, known, frozenset(_special_ids(tokenizer))


def _special_ids(tokenizer: Any) -> set[int]:
    """Tokens that a tokenizer has a use for, such as the end of a text, and others that were added as no text."""
    try:
        added = getattr(tokenizer, "added_tokens_decoder", {})
    except NotImplementedError:  # a tokenizer that names all of them itself
        added = {}
    named = {token for token in getattr(tokenizer, "all_special_ids", ()) if token is not None}
    return named.union(token for token, how in added.items() if how.special)


def _token_texts(tokenizer: Any, size: int) -> list[bytes]:
    """What each token adds behind another one, which keeps a decoder from dropping its first space."""
    anchor = encode(tokenizer, "a")[-1:]
    known = min(size, max(tokenizer.get_vocab().values()) + 1) if hasattr(tokenizer, "get_vocab") else size
    before, *decoded = _decode_all(tokenizer, [anchor, *([*anchor, token] for token in range(known))])
    texts = []
    for token, text in enumerate(decoded):
        added = text[len(before) :] if text.startswith(before) else ""
        texts.append(_fragment(tokenizer, token) if "\ufffd" in added else added.encode(errors="ignore"))
    return texts + [b""] * (size - known)


def _decode_all(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    if hasattr(tokenizer, "batch_decode"):
        return tokenizer.batch_decode(sequences, **options)
    return [tokenizer.decode(tokens, **options) for tokens in sequences]


def _fragment(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token that holds part of a character, read off its name in the vocabulary."""
    name = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else ""
    if isinstance(name, bytes):
        return name
    fallback = _FALLBACK.fullmatch(name)
    if fallback:
        return bytes([int(fallback[1], 16)])
    return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else b""


def _byte_names() -> dict[str, int]:
    """GPT-2's names of the 256 bytes: printable ones stand for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_names()
