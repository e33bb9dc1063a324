"""Text, tokens and duplicated work of a run up to a budget of forward passes, read from its transcript.

Every mode records which row generated which token at which decode pass. So a run at the largest budget holds the texts
at all smaller ones (Hogwild! Inference, section 4.1: accuracy against the number of consecutive passes).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from hf_parallel.files import JSONObject
from hf_parallel.transcript.sections import GIVEN

NGRAM = 5
"""Number of words in a phrase. A phrase that another row repeats is duplicated work."""
Pieces: TypeAlias = list[tuple[int, str]]
"""Decode pass and text of each token of a row, in order."""


@dataclass(frozen=True)
class Written:
    """Result of a run within a budget."""

    text: str
    """Texts of all rows: finished ones in the order in which they ended, then unfinished ones."""
    rows: list[str]
    """Text of each row (worker, answer, branch), without texts that span all rows, such as conclusions."""
    passes: int
    """Decode passes, at most the budget."""
    tokens: int
    """Generated tokens of all rows."""
    duplicated: float
    """See `duplicated_work`."""


def written_until(run: JSONObject, budget: int) -> Written:
    """Return the texts that the rows of a call with one prompt wrote within a budget of decode passes.

    Parameters
    ----------
    run : mapping
        The transcript of the call, `output.to_dict(tokenizer)`.
    budget : int
        Number of decode passes, at least 1.
    """
    (section,) = run["sections"]
    final = (run["style"]["final_event"], "join")  # events that finish a text
    texts: list[tuple[float, str]] = []
    rows: dict[int, Pieces] = {}
    passes = 0
    generated: set[tuple[int | None, int]] = set()  # a row generates one token per pass, of one or more pieces
    for card in section["cards"]:
        if card["begin"] >= budget:
            continue
        pieces = [(at, text, origin) for at, text, origin in card["pieces"] if at <= budget]
        is_whole = card["ended"] in final and len(pieces) == len(card["pieces"])
        last = max((at for at, _, _ in pieces), default=card["begin"])
        texts.append((last if is_whole else math.inf, card["given"] + "".join(text for _, text, _ in pieces)))
        if card["column"] is not None:
            rows.setdefault(card["column"], []).append((card["begin"], card["given"]))
            rows[card["column"]] += [(at, text) for at, text, _ in pieces]
        generated |= {(card["column"], at) for at, _, origin in pieces if origin != GIVEN}
        passes = max(passes, last)
    ordered = [text.rstrip() for _, text in sorted(texts, key=lambda entry: entry[0])]
    columns = [rows[column] for column in sorted(rows)]
    return Written(
        "\n\n".join(filter(None, ordered)),
        ["".join(text for _, text in row) for row in columns],
        passes,
        len(generated),
        duplicated_work(columns, section["prompt"] or ""),
    )


def duplicated_work(rows: Sequence[Pieces], prompt: str = "") -> float:
    """Return the fraction of the rows' phrases of `NGRAM` words that another row wrote before.

    Phrases of the prompt do not count, because copying the question is no work. Ignores case and punctuation.
    """
    known = {phrase for _, phrase in _phrases([(0, prompt)])}
    found = sorted(
        (at, index, phrase) for index, row in enumerate(rows) for at, phrase in _phrases(row) if phrase not in known
    )
    writers: dict[tuple[str, ...], set[int]] = {}
    duplicated = 0
    for _, index, phrase in found:
        before = writers.setdefault(phrase, set())
        duplicated += bool(before - {index})
        before.add(index)
    return duplicated / len(found) if found else 0.0


def _phrases(row: Pieces) -> list[tuple[int, tuple[str, ...]]]:
    """Return the phrases of a row, each with the decode pass of its last word."""
    ends = list(accumulate(len(text) for _, text in row))
    words = list(re.finditer(r"\w+", "".join(text for _, text in row).casefold()))
    passes = [row[min(bisect_right(ends, word.end() - 1), len(row) - 1)][0] for word in words]
    return [
        (passes[last], tuple(word.group() for word in words[last + 1 - NGRAM : last + 1]))
        for last in range(NGRAM - 1, len(words))
    ]
