"""Collaboration of workers, measured from what they wrote and when, without a judge.

Hogwild! Inference (section 4.3) asks GPT-4o for ratings, and calls the proprietary judge a limitation. The figures here
need no model: work that was done twice, workers that speak to each other, and results that others use.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

Pieces: TypeAlias = Sequence[tuple[int, str]]
"""Decode pass and text of each token of a row, in order, without text that was inserted."""

NGRAM = 5
"""Number of words in a phrase. A phrase that another row repeats is duplicated work."""
DIGITS = 2
"""Minimum number of digits of a result: smaller numbers are everywhere."""
_NUMBER = re.compile(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?(?![.,]?\d)")
_EQUALS = re.compile(r"=[\s$*({]*(?:\\\w+\s*\{)?\s*$")  # before a number: the number is a result
_OPERATOR = re.compile(r"[\s$]*(?:[-+*/^x×·÷]|\\times|\\cdot|\\div)\s*[\d($\\]")  # after it: it is not


def measure(rows: Sequence[Pieces], names: Sequence[str], prompt: str = "") -> dict[str, float]:
    """Return the measures of collaboration that several rows have.

    Parameters
    ----------
    rows : sequence of pieces
        What each row generated, and at which decode pass.
    names : sequence of str
        The name of each row.
    prompt : str
        Phrases and numbers of the prompt do not count.

    Returns
    -------
    dict
        `duplicated`: see `duplicated_work`. `mentions`: how often rows write the name of another row, per 100 words.
        `reused`: see `reused_results`; missing if there are no results.
    """
    reused = reused_results(rows, prompt)
    return {
        "duplicated": duplicated_work(rows, prompt),
        "mentions": names_mentioned(rows, names),
        **({} if reused is None else {"reused": reused}),
    }


def duplicated_work(rows: Sequence[Pieces], prompt: str = "") -> float:
    """Return the fraction of the rows' phrases of `NGRAM` words that another row wrote before.

    Phrases of the prompt do not count, because copying the question is no work. Ignores case and punctuation.
    """
    prompt_phrases = {phrase for _, phrase in _phrases([(0, prompt)])}
    written = []
    for index, row in enumerate(rows):
        for at, phrase in _phrases(row):
            if phrase not in prompt_phrases:
                written.append((at, index, phrase))
    written.sort()
    writers: dict[tuple[str, ...], set[int]] = {}
    duplicated = 0
    for _, index, phrase in written:
        earlier_writers = writers.setdefault(phrase, set())
        if earlier_writers - {index}:
            duplicated += 1
        earlier_writers.add(index)
    return duplicated / len(written) if written else 0.0


def names_mentioned(rows: Sequence[Pieces], names: Sequence[str]) -> float:
    """Return how often rows write the name of another row, per 100 words."""
    words = 0
    mentions = 0
    for writer, row in enumerate(rows):
        text = _text(row)
        words += len(re.findall(r"\w+", text))
        for other, name in enumerate(names):
            if other != writer:
                mentions += len(re.findall(rf"\b{re.escape(name)}\b", text))
    return 100 * mentions / words if words else 0.0


def reused_results(rows: Sequence[Pieces], prompt: str = "") -> float | None:
    """Return the fraction of results that another row uses later, or None without results.

    A result is a number of at least `DIGITS` digits after an equals sign that is neither in the prompt nor written
    before. Another row uses it if it writes the number at a later decode pass without having computed it itself.
    """
    numbers = []
    for index, row in enumerate(rows):
        for at, value, is_result in _numbers(row):
            numbers.append((at, index, value, is_result))
    numbers.sort(key=lambda number: number[:2])  # numbers of a row at one pass stay in order
    first: dict[str, tuple[int, int]] = {}  # pass and row that wrote the number as a result, if it was new
    seen = {_value(match) for match in _NUMBER.finditer(prompt)}
    computed: set[tuple[int, str]] = set()
    reused: set[str] = set()
    for at, index, value, is_result in numbers:
        if is_result and value not in seen:
            first[value] = (at, index)
        elif value in first and not is_result and (index, value) not in computed:
            first_pass, first_row = first[value]
            if index != first_row and at > first_pass:
                reused.add(value)
        if is_result:
            computed.add((index, value))
        seen.add(value)
    return len(reused) / len(first) if first else None


def _text(row: Pieces) -> str:
    return "".join(text for _, text in row)


def _passes(row: Pieces, ends: Sequence[int]) -> list[int]:
    """Return the decode passes at which the characters before `ends` of a row's text were written."""
    limits = list(accumulate(len(text) for _, text in row))
    passes = []
    for end in ends:
        index = min(bisect_right(limits, end - 1), len(row) - 1)
        number, _ = row[index]
        passes.append(number)
    return passes


def _phrases(row: Pieces) -> list[tuple[int, tuple[str, ...]]]:
    """Return the phrases of a row, each with the decode pass of its last word."""
    words = list(re.finditer(r"\w+", _text(row).casefold()))
    passes = _passes(row, [word.end() for word in words])
    phrases = []
    for end in range(NGRAM, len(words) + 1):
        phrase = tuple(word.group() for word in words[end - NGRAM : end])
        phrases.append((passes[end - 1], phrase))
    return phrases


def _numbers(row: Pieces) -> list[tuple[int, str, bool]]:
    """Return the numbers of a row that have enough digits: decode pass, value, and whether it is a result."""
    text = _text(row)
    matches = []
    for match in _NUMBER.finditer(text):
        digits = sum(map(str.isdigit, match.group()))
        if digits >= DIGITS:
            matches.append(match)
    passes = _passes(row, [match.end() for match in matches])
    numbers = []
    for match, at in zip(matches, passes, strict=True):
        follows_equals = bool(_EQUALS.search(text, 0, match.start()))
        is_result = follows_equals and not _OPERATOR.match(text, match.end())
        numbers.append((at, _value(match), is_result))
    return numbers


def _value(match: re.Match[str]) -> str:
    return match.group().replace(",", "")
