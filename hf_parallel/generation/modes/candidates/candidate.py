"""Candidate, the argument of a scorer, and what a scorer may be."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Candidate:
    """A finished or unfinished completion, the argument of a scorer; see `BestOfConfig`."""

    prompt: str
    text: str
    """New text without special tokens."""
    tokens: list[int]
    """New tokens, including an end-of-sequence token."""
    mean_log_prob: float
    """Mean log-probability of the tokens under the model."""
    is_complete: bool
    """Whether it has ended."""


Scorer: TypeAlias = Callable[[Candidate], float]


def resolve_scorer(scorer: object) -> Scorer:
    """Return a scorer, given as a function or as `"module:function"`; raise `ValueError` for anything else."""
    function = scorer
    if isinstance(scorer, str):
        try:
            function = pkgutil.resolve_name(scorer) if scorer.count(":") == 1 else None
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"scorer={scorer!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"scorer must be callable, or 'module:function', got {scorer!r}")
    return function


def score_of(scorer: Scorer, candidate: Candidate) -> float:
    """Return the score of a candidate; raise `TypeError` or `ValueError` if the scorer returns no number."""
    result = scorer(candidate)
    try:
        score = float("text" if isinstance(result, str) else result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"scorer must return a number, got {result!r} for {candidate.text!r}") from error
    if math.isnan(score):
        raise ValueError(f"scorer must return a number, got nan for {candidate.text!r}")
    return score
