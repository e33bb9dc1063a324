"""Judge: a model rates the collaboration of workers from 1 to 6 (Hogwild! Inference, section 4.2).

`judge` takes any function from a prompt to a reply.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from hf_parallel.generation.validation import check_int

Complete = Callable[[str], str]
PROMPT = Path(__file__).with_name("judge_prompt.txt")
"""Rubric, delimited transcript and reminder. The paper describes 1, 3 and 6; 2 and 4 follow its appendix G.3."""
_SCORE = re.compile(r"score[\"'*_`\s]{0,8}(?:[:=]|is)[\"'*_`\s]{0,8}(\d+)(?![\d.]*\d)", re.IGNORECASE)
_REASON = re.compile(
    r"reason[\"'*_`\s]{0,8}[:=]\s*(.+?)(?=\n\s*[\"'*_`{,]*score|[\"']\s*[,}]|\Z)", re.IGNORECASE | re.DOTALL
)


class UnreadableReplyError(ValueError):
    """Raised if no reply of a judge has a score."""


@dataclass(frozen=True)
class Judgement:
    """Rating of a transcript: mean score, all scores, and the reason for the first."""

    score: float
    reason: str
    scores: tuple[int, ...]


def judge(transcript: str | Mapping[str, str], complete: Complete, *, votes: int = 1, attempts: int = 3) -> Judgement:
    """Rate the collaboration of workers.

    Parameters
    ----------
    transcript : str or Mapping[str, str]
        The text, or the texts of the workers by name. The paper joins the paragraphs of a worker, because judges favor
        short turns, and compares prefixes of equal length.
    complete : Callable[[str], str]
        Returns a model's reply to a prompt, or an empty text if the model refuses.
    votes : int
        Number of independent ratings, whose mean is the score. The paper uses 3.
    attempts : int
        Maximum number of replies to ask for until one has a score, per rating.

    Raises
    ------
    ValueError
        If the transcript is blank or not text, or if a reply is not text.
    UnreadableReplyError
        If no reply of a rating has a score.
    """
    check_int("votes", votes, at_least=1)
    check_int("attempts", attempts, at_least=1)
    ratings = [_rate(judge_prompt(transcript), complete, attempts) for _ in range(votes)]
    scores = tuple(score for score, _ in ratings)
    return Judgement(fmean(scores), ratings[0][1], scores)


def judge_prompt(transcript: str | Mapping[str, str]) -> str:
    """Return the prompt of a judge: rubric, delimited transcript and reminder."""
    texts = transcript.values() if isinstance(transcript, Mapping) else [transcript]
    if not all(isinstance(text, str) for text in texts) or not "".join(texts).strip():
        raise ValueError(f"transcript must be a non-blank text, or texts by worker, got {transcript!r:.80}")
    if isinstance(transcript, Mapping):
        transcript = "\n\n".join(f"Text of {name}:\n{text.strip()}" for name, text in transcript.items())
    mark = f"===== {hashlib.sha256(transcript.encode('utf-8', 'replace')).hexdigest()[:12]} ====="
    return PROMPT.read_text(encoding="utf-8").format(mark=mark, transcript=transcript)


def read_reply(reply: str) -> tuple[int, str] | None:
    """Return score and reason of a reply after `</think>`, or None unless it has exactly one valid score."""
    text = reply.rpartition("</think>")[2]
    scores = {int(digits) for digits in _SCORE.findall(text) if len(digits) < 3}
    if len(scores) != 1 or not scores <= set(range(1, 7)):
        return None
    reason = _REASON.search(text)
    return scores.pop(), " ".join(reason[1].split()).strip("\"'*_, ") if reason else ""


def _rate(prompt: str, complete: Complete, attempts: int) -> tuple[int, str]:
    reply = ""
    for number in range(attempts):
        repeated = "\n\nYour last reply had no line with one score." if number else ""
        reply = complete(prompt + repeated)
        if not isinstance(reply, str):
            raise ValueError(f"complete must return a text, got {reply!r:.80}")
        if (found := read_reply(reply)) is not None:
            return found
    raise UnreadableReplyError(
        f"no score from 1 to 6 in {attempts} replies of the judge; the last one ends with {reply[-200:]!r}"
    )
