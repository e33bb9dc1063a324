"""Final answers of texts: extraction, comparison and majority voting."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import regex

from hf_parallel.generation.validation import check_text

_BRACED = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*"
BOXED = rf"\\boxed\{{({_BRACED})\}}"
"""`\\boxed{answer}`, with balanced braces in the answer up to three deep."""
PATTERN_SECONDS = 1.0
"""Time limit for a regular expression on one text."""
PATTERN_LENGTH = 10_000
PATTERN_REPEATS = 100_000
"""Limits of a regular expression, so that it compiles within a second: characters, and product of the repeat counts
`{n}`, because `regex` compiles repeated parts n times."""
SHOWN_LENGTH = 40
"""Maximum number of characters of a regular expression in messages."""
_NUMBER = re.compile(r"\+?(-?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.(\d*))?")
_EMPHASIS = re.compile(r"^(\*{1,3}|`)(?=[^\s*`])([^*`]+)(?<=\S)\1$")
_logger = logging.getLogger(__name__)


def check_pattern(name: str, pattern: Any) -> None:
    """Raise a `ValueError` unless `pattern` is a regular expression that is small enough to compile."""
    check_text(name, pattern)
    repeats = math.prod(max(1, int(count)) for count in re.findall(r"\{\s*(\d{1,9})", pattern[:PATTERN_LENGTH]))
    if len(pattern) > PATTERN_LENGTH or repeats > PATTERN_REPEATS:
        raise ValueError(
            f"{name} must have at most {PATTERN_LENGTH} characters, and repeat counts whose product is at most "
            f"{PATTERN_REPEATS}, got {pattern[:80]!r}"
        )
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r} ({error})") from error


def describe_pattern(pattern: str) -> str:
    """Return `answer_pattern` for a message: the default by its meaning, a long one shortened."""
    if pattern == BOXED:
        return "answer_pattern (the default, \\boxed{...})"
    ellipsis = "..." if len(pattern) > SHOWN_LENGTH else ""
    return f"answer_pattern={pattern[:SHOWN_LENGTH]!r}{ellipsis}"


def find_matches(pattern: str, text: str) -> list[regex.Match[str]]:
    """Return all matches of a regular expression in a text, or none and a warning after `PATTERN_SECONDS`."""
    try:
        return list(regex.finditer(pattern, text, timeout=PATTERN_SECONDS))
    except TimeoutError:
        _logger.warning("the regular expression %r was stopped after %s s on one text", pattern, PATTERN_SECONDS)
        return []


def find_answer(pattern: str, text: str) -> str | None:
    """Return the last non-blank final answer in a text, or None.

    An answer is the first group of `pattern`, if it has one, else the whole match. An empty pattern matches nothing.
    """
    if not pattern:
        return None
    return _last_answer(find_matches(pattern, text))


class GrowingAnswer(NamedTuple):
    """A final answer in a text that is still being written."""

    text: str
    may_change: bool
    """Whether further text may make it longer: `(\\d+)` matches the first digit of a number, too."""


def first_answer(pattern: str, text: str, begin: int) -> GrowingAnswer | None:
    """Return the first non-blank final answer that ends after character `begin` of a text, or None."""
    for match in find_matches(pattern, text):
        answer = _last_answer([match])
        if answer is not None and match.end() > begin:
            return GrowingAnswer(answer, match.end() == len(text) and _may_grow(pattern, match))
    return None


def _may_grow(pattern: str, match: regex.Match[str]) -> bool:
    """Return whether a match at the end of a text may be another one once more text follows."""
    try:
        # It never matches, so that all matches of the pattern are tried; a partial one has reached the end of the text.
        longer = regex.compile(f"(?:{pattern})(?!)")
        return longer.match(match.string, match.start(), partial=True, timeout=PATTERN_SECONDS) is not None
    except (regex.error, TimeoutError):
        return True


class AnswerSearch:
    """Searches many texts by one pattern like `find_answer`, until a search reaches the time limit.

    Otherwise, a pattern that is too slow for a growing text would use up the limit at each token.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def find(self, text: str) -> str | None:
        """Return the last non-blank final answer in a text, or None."""
        if not self.pattern:
            return None
        try:
            matches = list(regex.finditer(self.pattern, text, timeout=PATTERN_SECONDS))
        except TimeoutError:
            message = "the regular expression %r was stopped after %s s on one text: no further answer is searched for"
            _logger.warning(message, self.pattern, PATTERN_SECONDS)
            self.pattern = ""
            return None
        return _last_answer(matches) if matches else None


def _last_answer(matches: Sequence[regex.Match[str]]) -> str | None:
    for match in reversed(matches):
        answer: str | None = match.group(1 if match.re.groups else 0)
        if answer and answer.strip():
            return answer
    return None


def normal_form(answer: str) -> str:
    r"""Normalize an answer: equivalent answers have the same normal form.

    Ignores case, surrounding and repeated whitespace, a full stop at the end, surrounding dollar signs, `\text{}` and
    Markdown's emphasis of the whole answer.
    Numbers are compared by value: `1,000.0` becomes `1000`.

    Votes are counted by this form. math-verify cannot replace it: it compares two formulas instead of returning a key,
    and its comparison is not symmetric.
    """
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)
    plain = _EMPHASIS.sub(r"\2", " ".join(plain.split()))
    plain = plain.strip("$ ").removesuffix(".").strip("$ ").casefold()
    number = _NUMBER.fullmatch(plain)
    if number is None:
        return plain
    sign, whole, fraction = number.groups(default="")
    whole = whole.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


Key = TypeVar("Key", bound=Hashable)


def majority(answers: Sequence[Key | None], weights: Sequence[float] | None = None) -> tuple[int, dict[Key, float]]:
    """Count votes; a tie goes to the answer that occurs first (Wang et al., Self-Consistency, 2022).

    Return the index of the first answer that equals the winner (0 without votes), and the votes by answer in order of
    first occurrence: sums of `weights`, or counts. None does not vote. Pass the `normal_form` of texts.
    """
    votes: dict[Key, float] = {}
    for answer, weight in zip(answers, weights or [1] * len(answers), strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + weight
    if not votes:
        return 0, votes
    winner = max(votes, key=votes.__getitem__)
    return answers.index(winner), votes
