"""Judge: a model rates the collaboration of workers from 1 to 6 (Hogwild! Inference, 4.3), or answers from 1 to 5.

`judge` takes any function from a prompt to a reply. `Judge` is the judge of a sweep.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.generation.validation import check_choice, check_int

Complete = Callable[[str], str]
Transcript = str | Mapping[str, str]
PROMPT, ANSWER_PROMPT = (Path(__file__).with_name(f"{name}_prompt.txt") for name in ("judge", "answer"))
"""Rubric, delimited texts and reminder. Levels: Hogwild! Inference describes 1, 3 and 6, and its appendix G.3 2 and 4;
those of answers follow appendix C of Parallel Decoding in One Sequence, in our own words."""
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


def judge(
    transcript: Transcript, complete: Complete, *, votes: int = 1, attempts: int = 3, problem: Problem | None = None
) -> Judgement:
    """Rate the collaboration of workers from 1 to 6, or an answer from 1 to 5.

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
    problem : Problem, optional
        If given, the transcript is an answer to it, and `problem.answer` the reference (PDOS, section 4.2).

    Raises
    ------
    ValueError
        If the transcript is blank or not text, or if a reply is not text.
    UnreadableReplyError
        If no reply of a rating has a score.
    """
    check_int("votes", votes, at_least=1)
    check_int("attempts", attempts, at_least=1)
    prompt = judge_prompt(transcript, problem)
    most = 6 if problem is None else 5
    ratings = [_rate(prompt, complete, attempts, most) for _ in range(votes)]
    scores = tuple(score for score, _ in ratings)
    return Judgement(fmean(scores), ratings[0][1], scores)


@dataclass(frozen=True)
class Judge:
    """Judge of a sweep.

    Parameters
    ----------
    kind : str
        `collaboration`: rates the texts of workers within the budget. `answer`: rates the scored text. See `judge`.
    model : str
        A model at an OpenAI-compatible endpoint, which `OPENAI_BASE_URL` and `OPENAI_API_KEY` choose. It rates
        collaboration three times, as in Hogwild! Inference. Empty: the evaluated model itself, greedily and once.
    """

    kind: str
    model: str = ""

    def __post_init__(self) -> None:
        check_choice("the kind of a judge", self.kind, ("collaboration", "answer"))
        if self.model:
            _client()  # raises before anything is generated if the package or the key is missing

    def rate(self, rows: Mapping[str, str], text: str, problem: Problem, own: Complete) -> float | None:
        """Return the rating of the texts of rows, or of the text as an answer; None if no reply has a score."""
        complete = own
        votes = 1
        if self.model:
            complete = self._ask
            votes = 3
        try:
            if self.kind == "answer":
                answer = text.strip() or "(empty)"
                return judge(answer, complete, problem=problem).score
            texts = {name: row.strip() or "(empty)" for name, row in rows.items()}
            return judge(texts, complete, votes=votes).score
        except UnreadableReplyError:
            return None

    def _ask(self, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        settings: Any = {"temperature": 0} if self.kind == "answer" else {}
        reply = _client().chat.completions.create(messages=messages, model=self.model, **settings)
        return reply.choices[0].message.content or ""


def _client() -> Any:
    from openai import OpenAI

    return OpenAI()


def judge_prompt(transcript: Transcript, problem: Problem | None = None) -> str:
    """Return the prompt of a judge: rubric, delimited texts and reminder."""
    texts = transcript.values() if isinstance(transcript, Mapping) else [transcript]
    if not all(isinstance(text, str) for text in texts) or not "".join(texts).strip():
        raise ValueError(f"transcript must be a non-blank text, or texts by worker, got {transcript!r:.80}")
    if isinstance(transcript, Mapping):
        transcript = "\n\n".join(f"Text of {name}:\n{text.strip()}" for name, text in transcript.items())
    file = PROMPT if problem is None else ANSWER_PROMPT
    template = file.read_text(encoding="utf-8")
    digest = hashlib.sha256(transcript.encode("utf-8", "replace")).hexdigest()
    return template.format(mark=f"===== {digest[:12]} =====", transcript=transcript, problem=problem)


def read_reply(reply: str, most: int = 6) -> tuple[int, str] | None:
    """Return score and reason of a reply after `</think>`, or None unless it has one valid score, of 1 to `most`."""
    _, _, text = reply.rpartition("</think>")
    scores = {int(digits) for digits in _SCORE.findall(text) if len(digits) < 3}
    if len(scores) != 1:
        return None
    (score,) = scores
    if not 1 <= score <= most:
        return None
    reason = ""
    match = _REASON.search(text)
    if match is not None:
        reason = " ".join(match[1].split()).strip("\"'*_, ")
    return score, reason


def _rate(prompt: str, complete: Complete, attempts: int, most: int) -> tuple[int, str]:
    reply = ""
    for number in range(attempts):
        repeated = "\n\nYour last reply had no line with one score." if number else ""
        reply = complete(prompt + repeated)
        if not isinstance(reply, str):
            raise ValueError(f"complete must return a text, got {reply!r:.80}")
        rating = read_reply(reply, most)
        if rating is not None:
            return rating
    raise UnreadableReplyError(
        f"no score from 1 to {most} in {attempts} replies of the judge; the last one ends with {reply[-200:]!r}"
    )
