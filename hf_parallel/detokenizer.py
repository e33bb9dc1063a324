"""Text of tokens, whole or token by token, and the bytes of single tokens.

One rule for all texts: they leave out the `hidden_tokens`, which are those that end a row, and special tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_CONTEXT = 6  # least tokens decoded again before the new ones, as spaces and merged characters depend on them
_MAX_CONTEXT = 4 * _CONTEXT  # if no characters are complete
_MAX_INCOMPLETE = 3  # tokens held back until a character is complete: it has at most four bytes, a token at least one
_REPLACEMENT = "\ufffd"  # decoded from bytes that form no character, or no complete one
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a SentencePiece byte-fallback token."""
_BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}


class IncrementalDetokenizer:
    """Decodes a growing sequence of tokens; each token is decoded O(1) times.

    The tokens `hidden` have no text. A character whose bytes are incomplete is held back for at most three tokens.
    tokenizers' `DecodeStream` does not fit: it raises on tokenizers with byte fallback, holds back invalid bytes
    without limit, and needs a fast tokenizer. `text` is the text of `tokens` without what is held back; `visible` are
    the tokens that are not hidden.

    `before` are the tokens of a text that this one continues: SentencePiece drops the space before the first word of a
    text. They are in `visible`, but in neither `tokens` nor `text`. After a hidden token, a text begins anew.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] = (), before: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.hidden = hidden
        self.tokens: list[int] = []
        continued = list(before[-_CONTEXT:])
        if continued and continued[-1] in hidden:
            continued = []
        self.visible: list[int] = [token for token in continued if token not in hidden]
        self.text = ""
        self._num_decoded = len(self.visible)  # visible tokens that `text` covers, and those before
        self._decoded = 0, 0, ""  # text of visible tokens, from a first to a last one
        self._starts = [0]  # where decoding may begin: within a character of several byte tokens it would fail

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens. Return the text that they add."""
        self.tokens += tokens
        for token in tokens:
            if token not in self.hidden:
                self.visible.append(token)
        start = self._start()
        oldest = len(self.visible) - _MAX_INCOMPLETE
        prefix = self._before(start)
        for end in range(len(self.visible), self._num_decoded, -1):
            added = self._added(prefix, start, end)
            complete = not added.endswith(_REPLACEMENT)
            if complete or end <= oldest:
                self._num_decoded = end
                if complete or end - self._starts[-1] > _MAX_CONTEXT:
                    self._starts.append(end)
                self.text += added
                return added
        return ""

    def fork(self) -> IncrementalDetokenizer:
        """Return a copy, to which other tokens can be appended."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(twin, name, list(value))
        return twin

    def flush(self) -> str:
        """Return the text of the tokens that are held back, as no others follow."""
        start = self._start()
        added = self._added(self._before(start), start, len(self.visible))
        self._num_decoded = len(self.visible)
        self.text += added
        return added

    def _before(self, start: int) -> str:
        """Return the text of the visible tokens from `start` to the last that `text` covers."""
        first, last, text = self._decoded
        if first == start and last == self._num_decoded:  # as in most steps, decoded by the last one
            return text
        return _decode(self.tokenizer, self.visible[start : self._num_decoded])

    def _added(self, prefix: str, start: int, end: int) -> str:
        """Return the text that tokens add before index `end`; `prefix` is the text from `start` to the last of them."""
        text = _decode(self.tokenizer, self.visible[start:end])
        self._decoded = start, end, text
        continues = text.startswith(prefix)
        if continues and not text.endswith(_REPLACEMENT):
            return text[len(prefix) :]
        # An invalid byte makes a whole run of byte tokens unreadable, with the characters before it.
        alone = _decode(self.tokenizer, self.visible[self._num_decoded : end])
        if continues and alone.endswith(_REPLACEMENT):
            return text[len(prefix) :]
        return alone

    def _start(self) -> int:
        """Return a place at least `_CONTEXT` tokens back where a character begins, or 0.

        It stays until there is one twice as far, so that in most steps the text from there has been decoded.
        """
        starts = self._starts
        if self._num_decoded - starts[0] >= 2 * _CONTEXT:
            while len(starts) > 1 and starts[1] <= self._num_decoded - _CONTEXT:
                del starts[0]
        return starts[0]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the names of a tokenizer's special tokens: those in `all_special_ids`, and others added as special.

    Models end turns with tokens of the second kind, such as `<end_of_turn>` of Gemma 3 and `<|eom_id|>` of Llama 3.1.
    """
    try:
        added = getattr(tokenizer, "added_tokens_decoder", {})
    except NotImplementedError:  # raised by tokenizers with named special tokens only
        added = {}
    names = {token: str(added_token) for token, added_token in added.items() if added_token.special}
    for token in getattr(tokenizer, "all_special_ids", ()):
        if token is not None and token not in names:
            names[token] = _decode(tokenizer, [token])
    return names


def hidden_tokens(
    tokenizer: PreTrainedTokenizerBase, ends: Iterable[int] = (), format_texts: str = ""
) -> frozenset[int]:
    """Return the tokens that a text leaves out: those that end its row, and special tokens.

    Special tokens that occur in `format_texts`, such as tags of the format in which a model writes, are kept.
    """
    hidden = set(ends)
    for token, name in special_tokens(tokenizer).items():
        if not name or name not in format_texts:
            hidden.add(token)
    return frozenset(hidden)


def visible_text(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], hidden: Collection[int]) -> str:
    """Return the text of one sequence without its hidden tokens, as `IncrementalDetokenizer` streams it."""
    visible = [token for token in tokens if token not in hidden]
    text = decode(tokenizer, visible)
    if _REPLACEMENT not in text:
        return text
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.add([token]) for token in visible]
    parts.append(detokenizer.flush())
    return "".join(parts)


def token_bytes(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], before: Sequence[int]) -> list[bytes]:
    """Return the bytes that each token adds to the text of the tokens `before`, which end with a complete character.

    Decoders drop the leading space of a first token. A token that the tokenizer lacks has no bytes.
    """
    prefix = _decode(tokenizer, before)
    pieces = []
    for token in tokens:
        text = _decode(tokenizer, [*before, token])
        added = text[len(prefix) :] if text.startswith(prefix) else ""
        if _REPLACEMENT in added:
            pieces.append(_fragment(tokenizer, token, added))
        else:
            pieces.append(added.encode(errors="ignore"))
    return pieces


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Any, **options: bool) -> str:
    """Return the text of one sequence `[length]`; `tokenizer.decode` also takes several, and its type says so."""
    return tokenizer.decode(tokens, **options)  # type: ignore[return-value]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    ids: Any = tokens
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[return-value]


def _fragment(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token that is part of a character, from its name in the vocabulary; `text` is decoded."""
    name = ""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        name = tokenizer.convert_ids_to_tokens(token)
    if isinstance(name, bytes):
        return name
    fallback = _BYTE_FALLBACK.fullmatch(name)
    if fallback:
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTE_LEVEL for character in name):
        return bytes(_BYTE_LEVEL[character] for character in name)
    return text.encode()


def check_tokenizer(tokenizer: object) -> None:
    """Raise `ValueError` unless `tokenizer` has the interface of a tokenizer of transformers."""
    if isinstance(tokenizer, type) or not callable(tokenizer) or not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer must be a tokenizer that encodes when called and has decode(), got {tokenizer!r}")
