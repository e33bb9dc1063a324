"""Tasks generated from a seed: retrieval and arithmetic with exact answers, planning with a scored format.

Each asks for several independent parts and a conclusion, like the tasks of Parallel Decoding in One Sequence (section
4.2, appendix B) and Hogwild! Inference (section 4.1).
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hf_parallel.evaluation.grading import score_by_position
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.evaluation.tasks.game24 import evaluate
from hf_parallel.files import JSONObject
from hf_parallel.generation.modes import BOXED, find_answer, normal_form
from hf_parallel.generation.validation import check_int

WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""Names, topics of plans with seven aspects each, and kinds of word problems.

A kind has the answer as an expression of the numbers in its question, and the range of each number, whose bounds may be
expressions of the numbers before it.
"""


@dataclass(frozen=True)
class RetrievalProblem(Problem):
    """Find the full name of the only student whose GPA is in a range. No GPA equals `low` or `high`."""

    name: ClassVar[str] = "retrieval"
    answer_pattern: ClassVar[str] = r"(?i)\bname\**:[ \t*]*([^\n*]+)"

    students: tuple[str, ...]

    @classmethod
    def make(cls, seed: int, num_students: int = 10) -> RetrievalProblem:
        """Generate a problem with 2 to 100 students."""
        _check_count("num_students", num_students, 2, 100)
        draw = random.Random(f"{cls.name} {seed}")
        names = draw.sample(full_names(), num_students)
        hundredths = draw.sample(range(150, 480, 3), num_students)  # at least 0.03 apart, so bounds fit between
        resumes = []
        for name, gpa in zip(names, hundredths, strict=True):
            first, second, third = draw.sample(WORDS["interests"].split(), 3)
            age = draw.randint(19, 30)
            university = draw.choice(WORDS["universities"].split(", "))
            resume = f"{name} is {age} years old, studied at {university} and has a GPA of {gpa / 100:.2f}. "
            resumes.append(f"{resume}Interests: {first}, {second} and {third}.")
        students = list(zip(names, hundredths, strict=True))
        name, wanted = draw.choice(students)
        below = max((gpa for gpa in hundredths if gpa < wanted), default=wanted - 30)
        above = min((gpa for gpa in hundredths if gpa > wanted), default=wanted + 30)
        low = draw.randint(below + 1, wanted - 1) / 100
        high = draw.randint(wanted + 1, above - 1) / 100
        question = (
            f"Which student has a GPA between {low:.2f} and {high:.2f}? Go through all students, one by one, and say "
            "for each whether the GPA lies in this range. Give your final answer in a last line of the form "
            '"Name: full name of the student".'
        )
        opening = f"Here are the resumes of {num_students} students."
        prompt = "\n\n".join([opening, *resumes, f"Question: {question}"])
        return cls(prompt, name, tuple(names))

    def score(self, text: str) -> float:
        """Return 1.0 if the rest of the line after the last `Name:` is the student's full name, otherwise 0.0.

        Ignores case, bold type, quotes and final punctuation.
        """
        name = find_answer(self.answer_pattern, text)
        if name is None:
            return 0.0
        return float(normal_form(name.strip(" .!\"'")) == normal_form(self.answer))


@dataclass(frozen=True)
class ArithmeticProblem(Problem):
    r"""Independent word problems of two to four steps in one prompt.

    Answers are integers from 1 to 999. `answer` has all of them, separated by commas.
    """

    name: ClassVar[str] = "arithmetic"
    answer_pattern: ClassVar[str] = BOXED

    answers: tuple[int, ...]

    @classmethod
    def make(cls, seed: int, num_questions: int = 5) -> ArithmeticProblem:
        """Generate a problem with 1 to 10 questions of different kinds."""
        _check_count("num_questions", num_questions, 1, len(WORDS["word_problems"]))
        draw = random.Random(f"{cls.name} {seed}")
        kinds = draw.sample(WORDS["word_problems"], num_questions)
        questions, answers = zip(*(_word_problem(draw, kind) for kind in kinds), strict=True)
        form = ",".join(f"answer{number}" for number in range(1, num_questions + 1))
        numbered = [f"{number}. {question}" for number, question in enumerate(questions, start=1)]
        instruction = (
            f"Solve these problems and give all answers in the end, separated by commas: \\boxed{{{form}}}. Each "
            "answer is a whole number without a unit.\n\n"
        )
        prompt = instruction + "\n".join(numbered)
        return cls(prompt, ",".join(map(str, answers)), answers)

    def score(self, text: str) -> float:
        """Return the fraction of correct answers, compared by position; see `grading.score_by_position`."""
        return score_by_position(text, list(map(str, self.answers)))


@dataclass(frozen=True)
class PlanningProblem(Problem):
    """Discuss aspects of a topic, each under its heading. `answer` has one aspect per line. Only the format counts."""

    name: ClassVar[str] = "planning"

    aspects: tuple[str, ...]

    @classmethod
    def make(cls, seed: int, num_aspects: int = 5) -> PlanningProblem:
        """Generate a problem with 2 to 7 aspects."""
        _check_count("num_aspects", num_aspects, 2, 7)
        draw = random.Random(f"{cls.name} {seed}")
        topic = draw.choice(list(WORDS["topics"]))
        aspects = tuple(draw.sample(WORDS["topics"][topic].split(), num_aspects))
        prompt = (
            f"Make a plan for {topic}. Look at it from {num_aspects} aspects, each under a heading that is the name of "
            f"the aspect: {', '.join(aspects)}. Put everything together in the end."
        )
        return cls(prompt, "\n".join(aspects), aspects)

    def score(self, text: str) -> float:
        """Return the fraction of aspects that have a heading.

        A heading is a line with only the aspect, or with the aspect before a colon. Ignores case and marks such as
        `##`, `**`, `-` and `1.`.
        """
        headings = {_heading(line) for line in text.splitlines()}
        return sum(aspect.casefold() in headings for aspect in self.aspects) / len(self.aspects)


def _heading(line: str) -> str:
    title = re.sub(r"^[\s#*\-]*(\d+[.):])?[\s#*\-]*", "", line).split(":")[0]
    return " ".join(title.strip(" #*_").split()).casefold()


def _check_count(name: str, value: int, least: int, most: int) -> None:
    check_int(name, value, at_least=least)
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def full_names() -> list[str]:
    """Return all combinations of a first and a last name."""
    return [f"{first} {last}" for first in WORDS["first_names"].split() for last in WORDS["last_names"].split()]


def _word_problem(draw: random.Random, kind: JSONObject) -> tuple[str, int]:
    """Return a question with its answer."""
    numbers: dict[str, int] = {}
    for name, bounds in kind["ranges"].items():
        limits = [_calculate(bound, numbers) for bound in bounds]
        numbers[name] = draw.choice(range(*limits))
    question = kind["question"].format(**numbers)
    return question, _calculate(kind["answer"], numbers)


def _calculate(expression: str | int, numbers: Mapping[str, int]) -> int:
    return int(evaluate(ast.parse(str(expression).format(**numbers), mode="eval").body, []))
