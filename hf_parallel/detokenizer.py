"""Text that grows token by token, and where a reasoning step ends in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6
"""Tokens decoded before the new ones, so that spaces and merged characters come out as in the whole text."""
_WAITING = 3
"""Tokens that may wait for the rest of a character: it has at most four bytes, and a token at least one."""
_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""


class IncrementalDetokenizer:
    """Decodes tokens as they come, each a bounded number of times.

    `text` is what is known for certain; characters whose bytes are not complete yet are held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text = ""
        self._decoded = 0  # tokens that `text` covers

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the text that they added."""
        self.tokens += tokens
        start, oldest = max(self._decoded - _CONTEXT, 0), len(self.tokens) - _WAITING
        before = self._decode(self.tokens[start : self._decoded])
        for end in range(len(self.tokens), self._decoded, -1):
            after = self._decode(self.tokens[start:end])
            whole = after.startswith(before) and not after.endswith(_BROKEN)
            if whole or end <= oldest:  # what is older than a character will never be one
                self._decoded, added = end, after[len(before) :]
                self.text += added
                return added
        return ""

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def ends_step(text: str, added: str, separator: str, sentence_ends: Sequence[str], code_fence: str) -> bool:
    """Whether the text that a token `added` completes a reasoning step (Hogwild! Inference, appendix C).

    A step ends where a separator follows the end of a sentence, outside a code block.

    Parameters
    ----------
    text : str
        The step so far, `added` included.
    added : str
        What the last token added; the separator must be completed by it.
    separator : str
        Such as a blank line. A token may hold it inside, or only its last character.
    sentence_ends : sequence of str
        What the text before the separator must end with.
    code_fence : str
        Opens and closes a code block; empty: code blocks are not told apart.
    """
    if not added:
        return False
    place = text.find(separator, max(len(text) - len(added) - len(separator) + 1, 0))
    while place >= 0:
        before = text[:place]
        fenced = bool(code_fence) and before.count(code_fence) % 2 == 1
        if not fenced and before.rstrip().endswith(tuple(sentence_ends)):
            return True
        place = text.find(separator, place + 1)
    return False
