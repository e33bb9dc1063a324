"""Questions about long texts: several documents, and needles in a book."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from hf_parallel.evaluation.tasks.base import Problem, column, text_column
from hf_parallel.evaluation.tasks.generated import WORDS, full_names
from hf_parallel.generation.modes import find_answer, normal_form
from hf_parallel.generation.validation import check_int

ANSWER = r"(?i)\banswer\**:[ \t*]*([^\n*]+)"
"""The rest of a line after `Answer:`."""
NEEDLE = "In those years the cat of {name} had {color} eyes."


@dataclass(frozen=True)
class DocumentsProblem(Problem):
    """A question about several documents (PDOS, section 4.2: 2WikiMultihopQA of LongBench).

    `answer` is the first of `answers`. They are scored as in LongBench; in the paper, a model rates them (see `Judge`).
    """

    name: ClassVar[str] = "documents"
    answer_pattern: ClassVar[str] = ANSWER
    source: ClassVar[str] = "THUDM/LongBench:2wikimqa:test"
    hub_file: ClassVar[str] = "zip://data/{config}.jsonl::hf://datasets/{name}/data.zip"

    answers: tuple[str, ...]

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> DocumentsProblem:
        """Read `context` (all documents), `input` (the question) and `answers` (a list)."""
        answers = column(row, "answers")
        is_list = isinstance(answers, list) and len(answers) > 0
        if not is_list or not all(isinstance(text, str) and text for text in answers):
            raise ValueError(f"column 'answers' must be a list of texts, got {answers!r:.80}")
        prompt = (
            f"{text_column(row, 'context')}\n\nQuestion: {text_column(row, 'input')}\n\nGo through all passages, "
            "one by one, and say for each whether it helps to answer the question. Give a short answer in a last line "
            'of the form "Answer: your answer".'
        )
        return cls(prompt, answers[0], tuple(answers))

    def score(self, text: str) -> float:
        """Return the F1 score of the words after the last `Answer:`, for the best of the answers (LongBench, qa_f1)."""
        answer = find_answer(self.answer_pattern, text)
        if not answer:
            return 0.0
        return max(word_f1(reference, answer) for reference in self.answers)


@dataclass(frozen=True)
class NeedleProblem(Problem):
    """A question about one of many facts hidden in a book (Hydragen, section 4.3).

    Problems of one seed have the same text, so their prompts share everything but the question.
    """

    name: ClassVar[str] = "needles"
    answer_pattern: ClassVar[str] = ANSWER

    @classmethod
    def from_text(
        cls, text: str, count: int = 100, seed: int = 0, characters: int = 80_000, num_facts: int = 261, shots: int = 5
    ) -> list[NeedleProblem]:
        """Hide facts between the sentences of a text and ask for `count` of them.

        Parameters
        ----------
        text : str
            A book, such as War and Peace, whose beginning is used.
        count : int
            Number of problems. Questions repeat if there are more than facts to ask for, as in the paper.
        seed : int
            Seed of the facts and their places.
        characters : int
            Maximum length of the text with its facts. That of the paper has about 20,000 tokens.
        num_facts : int
            Number of facts.
        shots : int
            Number of facts that are examples, with question and answer, at the end of the text.
        """
        names = full_names()
        for name, value in {"count": count, "characters": characters, "num_facts": num_facts}.items():
            check_int(name, value, at_least=1)
        check_int("shots", shots, at_least=0)
        if not shots < num_facts <= len(names):
            raise ValueError(f"num_facts must be between shots={shots} and {len(names)}, got {num_facts}")
        draw = random.Random(f"{cls.name} {seed}")
        colors = WORDS["colors"].split()
        facts = [(name, draw.choice(colors)) for name in draw.sample(names, num_facts)]
        needles = [NEEDLE.format(name=name, color=color) for name, color in facts]
        free_characters = characters - sum(len(needle) + 1 for needle in needles)
        sentences = re.split(r"(?<=[.!?])\s+", text[: max(free_characters, 0)].strip())
        positions = sorted(draw.choices(range(len(sentences) + 1), k=num_facts), reverse=True)
        for position, needle in zip(positions, needles, strict=True):
            sentences.insert(position, needle)
        book = "Read this text.\n\n" + " ".join(sentences) + "\n\n"
        question = 'Question: Which color had the eyes of the cat of {}? End with a line of the form "Answer: color".'
        asked = draw.sample(facts, num_facts)
        for name, color in asked[:shots]:
            book += f"{question.format(name)}\nAnswer: {color}\n\n"
        problems = []
        for name, color in islice(cycle(asked[shots:]), count):
            problems.append(cls(book + question.format(name), color))
        return problems

    def score(self, text: str) -> float:
        """Return 1.0 if the rest of the line after the last `Answer:` is the color, otherwise 0.0."""
        color = find_answer(self.answer_pattern, text)
        if color is None:
            return 0.0
        return float(normal_form(color.strip(" .!\"'")) == self.answer)


def word_f1(answer: str, given: str) -> float:
    """Return the F1 score of the words of two answers, ignoring case, punctuation and articles (LongBench, qa_f1)."""
    answer_words = _words(answer)
    given_words = _words(given)
    common = sum((Counter(answer_words) & Counter(given_words)).values())
    if not common:
        return 0.0
    return 2 * common / (len(answer_words) + len(given_words))


def _words(text: str) -> list[str]:
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]
