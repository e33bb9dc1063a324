"""ThinkingEnd: finds the end of what a reasoning model writes before its answer (PDOS, sections 4.3 and 6).

The end is found in the text, whatever tokens it consists of: several tokens may form it, and one token may hold its end
and the beginning of the answer.
"""

from __future__ import annotations

import codecs
import logging
import re
from typing import TypeAlias

import regex

from hf_parallel.generation.modes.final_answers import PATTERN_SECONDS, check_pattern
from hf_parallel.generation.validation import check_text

After: TypeAlias = str | re.Pattern[str]
"""Text that ends the thinking, or a compiled regular expression."""
PATTERNS = (re.Pattern, regex.Pattern)
_logger = logging.getLogger(__name__)


def check_after(name: str, after: object) -> None:
    """Raise `ValueError` unless `after` is a text that is not empty, or a pattern of text that does not match it."""
    if isinstance(after, PATTERNS) and isinstance(after.pattern, str):
        check_pattern(name, after.pattern)
        if _compiled(after).search("") is not None:
            raise ValueError(f"{name} must not match an empty text, got {after!r}")
        return
    if not isinstance(after, str) or not after:
        raise ValueError(f"{name} must be a text that is not empty, or a compiled regular expression, got {after!r}")
    check_text(name, after)


def describe_after(after: After) -> str:
    """Return the end of the thinking for a message."""
    return repr(after if isinstance(after, str) else after.pattern)


class ThinkingEnd:
    """Finds the end of the thinking in a text that grows by tokens.

    A pattern ends the thinking with the first token after which it matches. If it reaches its time limit, the thinking
    does not end.
    """

    def __init__(self, after: After) -> None:
        self._pattern = _compiled(after)
        self._overlap = len(after) - 1 if isinstance(after, str) else None  # characters before a token; None: all
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def is_at_end_of(self, text: str) -> bool:
        """Return whether a text, such as a prompt, ends with the end of thinking, except for whitespace."""
        end = 0
        try:
            for match in self._pattern.finditer(text, timeout=PATTERN_SECONDS):
                end = match.end()
        except TimeoutError:
            self._warn()
            return False
        return end > 0 and not text[end:].strip()

    def feed(self, token: bytes) -> int | None:
        """Return how many bytes of the next token follow the end; None if the thinking has not ended."""
        if self._overlap is not None:
            self._text = self._text[max(len(self._text) - self._overlap, 0) :]
        self._text += self._decoder.decode(token)
        try:
            match = self._pattern.search(self._text, timeout=PATTERN_SECONDS)
        except TimeoutError:
            self._warn()
            self._pattern = regex.compile(r"(?!)")
            return None
        if match is None:
            return None
        incomplete, _ = self._decoder.getstate()
        return len(self._text[match.end() :].encode()) + len(incomplete)

    def _warn(self) -> None:
        message = "the regular expression %r was stopped after %s s: the thinking does not end"
        _logger.warning(message, self._pattern.pattern, PATTERN_SECONDS)


def _compiled(after: After) -> regex.Pattern[str]:
    """Return the pattern that finds the end, of the module `regex`, which has a time limit."""
    if isinstance(after, str):
        return regex.compile(regex.escape(after))
    return regex.compile(after.pattern, after.flags)
