"""Final answers: how they are found in a text, compared and counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hf_parallel.generation.config import check_text

_BRACED = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*"
BOXED = rf"\\boxed\{{({_BRACED})\}}"
"""`\\boxed{answer}`, the answer's own braces balanced up to three deep."""
_NUMBER = re.compile(r"\+?(-?)0*(\d+|\d{1,3}(?:,\d{3})+)(?:\.(\d*?)0*)?")


def check_pattern(name: str, pattern: Any) -> None:
    """Raise a `ValueError` unless `pattern` is a string that is a regular expression."""
    check_text(name, pattern)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r} ({error})") from error


def find_answer(pattern: str, text: str) -> str | None:
    """The last final answer in a text, or None; an empty one, such as a form that was copied, is none.

    Parameters
    ----------
    pattern : str
        Regular expression; its first group, if it has one, is the answer. Empty: none is looked for.
    text : str
    """
    if not pattern:
        return None
    answers = [match.group(1 if match.re.groups else 0) for match in re.finditer(pattern, text)]
    return next((answer for answer in reversed(answers) if answer and answer.strip()), None)


def normal_form(answer: str) -> str:
    r"""What answers that mean the same have in common.

    Case, spaces around and runs of spaces inside do not count, nor do a full stop at the end, dollar signs around and
    `\text{}`. Numbers are compared by value: `1,000.0` is `1000`.

    Parameters
    ----------
    answer : str
    """
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)
    plain = " ".join(plain.split()).strip("$ ").removesuffix(".").strip("$ ").casefold()
    number = _NUMBER.fullmatch(plain)
    if number is None:
        return plain
    sign, whole, fraction = number.groups(default="")
    value = whole.replace(",", "") + f".{fraction}" * bool(fraction)
    return value if value == "0" else sign + value


def majority(answers: Sequence[str | None]) -> tuple[int, dict[str, int]]:
    """The answer that most gave; of several, the one that came first (Wang et al., Self-Consistency, 2022).

    Parameters
    ----------
    answers : sequence of str or None
        None: no answer, no vote.

    Returns
    -------
    (index, votes) : int, dict of str to int
        The first answer that is equal to the winner, 0 if there is none; votes by normal form, first seen first.
    """
    forms = [None if answer is None else normal_form(answer) for answer in answers]
    votes: dict[str, int] = {}
    for form in forms:
        if form is not None:
            votes[form] = votes.get(form, 0) + 1
    return (forms.index(max(votes, key=votes.__getitem__)) if votes else 0), votes
