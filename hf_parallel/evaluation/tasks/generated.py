"""Tasks generated from a seed: retrieval and arithmetic with exact answers, planning with a scored format.

Each asks for several independent parts and a conclusion, like the tasks of Parallel Decoding in One Sequence (section
4.2, appendix B) and Hogwild! Inference (section 4.1).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from hf_parallel.evaluation.grading import score_by_position
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.generation.modes import BOXED, find_answer, normal_form
from hf_parallel.generation.validation import check_int

FIRST_NAMES = (
    "Ada Bruno Chiara Dmitri Elif Farid Greta Hamza Ines Jonas Keiko Lamin Mei Noor Oskar Priya Quentin Rosa Sven "
    "Tanvi Uma Viktor Wanda Yusuf"
)
LAST_NAMES = (
    "Abara Bergman Castro Dubois Eriksen Fischer Garcia Hoang Ivanov Jensen Kimura Lopez Moreau Novak Okafor Petrov "
    "Quist Rossi Sato Tanaka Weber"
)
UNIVERSITIES = (
    "Northfield University, Lakeside College, the Harbour Institute, Stonebridge University, Meadow Hill College, "
    "the Coastal Academy"
)
INTERESTS = (
    "astronomy baking chess drawing fencing gardening hiking jazz knitting languages painting photography poetry "
    "robotics rowing sailing theatre volunteering"
)
TOPICS = {
    "opening a small bakery": "location staff equipment suppliers prices advertising taxes",
    "a school trip to the mountains": "transport lodging meals safety costs activities luggage",
    "deliveries by drone in a city": "technology regulation safety noise costs acceptance climate",
    "moving an office to another town": "schedule furniture network contracts staff costs clients",
    "a library of the future": "books building events staff funding access technology",
    "a garden on a flat roof": "load water soil plants maintenance costs neighbours",
    "a music festival by a lake": "stage tickets food security weather waste volunteers",
}
"""Topics of plans, with seven aspects each."""


@dataclass(frozen=True)
class Student:
    """A student of a `RetrievalProblem`."""

    name: str
    age: int
    university: str
    gpa: float
    interests: tuple[str, ...]

    @property
    def resume(self) -> str:
        """Description of the student in the prompt."""
        *first, last = self.interests
        return (
            f"{self.name} is {self.age} years old, studied at {self.university} and has a GPA of {self.gpa:.2f}. "
            f"Interests: {', '.join(first)} and {last}."
        )


@dataclass(frozen=True)
class RetrievalProblem(Problem):
    """Find the full name of the only student whose GPA is in a range. No GPA equals `low` or `high`."""

    name: ClassVar[str] = "retrieval"
    answer_pattern: ClassVar[str] = r"(?i)\bname\**:[ \t*]*([^\n*]+)"

    students: tuple[Student, ...]
    low: float
    high: float

    @classmethod
    def make(cls, seed: int, num_students: int = 10) -> RetrievalProblem:
        """Generate a problem with 2 to 100 students."""
        _check_count("num_students", num_students, 2, 100)
        draw = random.Random(f"{cls.name} {seed}")
        everyone = [f"{first} {last}" for first in FIRST_NAMES.split() for last in LAST_NAMES.split()]
        names = draw.sample(everyone, num_students)
        hundredths = draw.sample(range(150, 480, 3), num_students)  # at least 0.03 apart, so bounds fit between
        students: list[Student] = []
        for name, gpa in zip(names, hundredths, strict=True):
            interests = tuple(draw.sample(INTERESTS.split(), 3))
            age, university = draw.randint(19, 30), draw.choice(UNIVERSITIES.split(", "))
            students.append(Student(name, age, university, gpa / 100, interests))
        name, wanted = draw.choice(list(zip(names, hundredths, strict=True)))
        below = max((gpa for gpa in hundredths if gpa < wanted), default=wanted - 30)
        above = min((gpa for gpa in hundredths if gpa > wanted), default=wanted + 30)
        low, high = draw.randint(below + 1, wanted - 1) / 100, draw.randint(wanted + 1, above - 1) / 100
        prompt = (
            f"Here are the resumes of {num_students} students.\n\n"
            + "\n\n".join(student.resume for student in students)
            + f"\n\nQuestion: Which student has a GPA between {low:.2f} and {high:.2f}? Go through all students, one "
            "by one, and say for each whether the GPA lies in this range. Give your final answer in a last line of the "
            'form "Name: full name of the student".'
        )
        return cls(prompt, name, tuple(students), low, high)

    def score(self, text: str) -> float:
        """Return 1.0 if the rest of the line after the last `Name:` is the student's full name, otherwise 0.0.

        Ignores case, bold type, quotes and final punctuation.
        """
        given = find_answer(self.answer_pattern, text)
        return float(given is not None and normal_form(given.strip(" .!\"'")) == normal_form(self.answer))


@dataclass(frozen=True)
class ArithmeticProblem(Problem):
    r"""Independent word problems of two to four steps in one prompt.

    Answers are integers from 1 to 999. `answer` has all of them, separated by commas.
    """

    name: ClassVar[str] = "arithmetic"
    answer_pattern: ClassVar[str] = BOXED

    questions: tuple[str, ...]
    answers: tuple[int, ...]

    @classmethod
    def make(cls, seed: int, num_questions: int = 5) -> ArithmeticProblem:
        """Generate a problem with 1 to 10 questions of different kinds."""
        _check_count("num_questions", num_questions, 1, len(WORD_PROBLEMS))
        draw = random.Random(f"{cls.name} {seed}")
        kinds = draw.sample(list(WORD_PROBLEMS.items()), num_questions)
        questions, answers = zip(*(_word_problem(draw, *kind) for kind in kinds), strict=True)
        form = ",".join(f"answer{number}" for number in range(1, num_questions + 1))
        prompt = (
            f"Solve these problems and give all answers in the end, separated by commas: \\boxed{{{form}}}. Each "
            "answer is a whole number without a unit.\n\n"
            + "\n".join(f"{number}. {question}" for number, question in enumerate(questions, start=1))
        )
        return cls(prompt, ",".join(map(str, answers)), questions, answers)

    def score(self, text: str) -> float:
        """Return the fraction of correct answers, compared by position; see `grading.score_by_position`."""
        return score_by_position(text, list(map(str, self.answers)))


@dataclass(frozen=True)
class PlanningProblem(Problem):
    """Discuss aspects of a topic, each under its heading. `answer` has one aspect per line. Only the format counts."""

    name: ClassVar[str] = "planning"

    topic: str
    aspects: tuple[str, ...]

    @classmethod
    def make(cls, seed: int, num_aspects: int = 5) -> PlanningProblem:
        """Generate a problem with 2 to 7 aspects."""
        _check_count("num_aspects", num_aspects, 2, 7)
        draw = random.Random(f"{cls.name} {seed}")
        topic = draw.choice(list(TOPICS))
        aspects = tuple(draw.sample(TOPICS[topic].split(), num_aspects))
        prompt = (
            f"Make a plan for {topic}. Look at it from {num_aspects} aspects, each under a heading that is the name of "
            f"the aspect: {', '.join(aspects)}. Put everything together in the end."
        )
        return cls(prompt, "\n".join(aspects), topic, aspects)

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


Range: TypeAlias = Sequence[int] | Callable[..., Sequence[int]]


def _word_problem(
    draw: random.Random, question: str, kind: tuple[Callable[..., int], dict[str, Range]]
) -> tuple[str, int]:
    """Return a question with its answer. A range may depend on numbers drawn before."""
    answer, ranges = kind
    numbers: dict[str, int] = {}
    for name, bounds in ranges.items():
        numbers[name] = draw.choice(bounds(**numbers) if callable(bounds) else bounds)
    return question.format(**numbers), answer(**numbers)


WORD_PROBLEMS: dict[str, tuple[Callable[..., int], dict[str, Range]]] = {
    "A shop gets {crates} crates of {each} apples. It throws {bad} rotten apples away and sells the rest. How many "
    "apples does it sell?": (
        lambda crates, each, bad: crates * each - bad,
        {"crates": range(3, 10), "each": range(12, 31), "bad": range(4, 12)},
    ),
    "Mina has {held} euros. She saves {weekly} euros a week for {weeks} weeks and then spends {spent} euros on a "
    "book. How many euros does she have left?": (
        lambda held, weekly, weeks, spent: held + weekly * weeks - spent,
        {"held": range(20, 61), "weekly": range(5, 16), "weeks": range(4, 13), "spent": range(8, 20)},
    ),
    "A bus leaves with {start} passengers. At the first stop {off} get off and {on} get on. At the second stop "
    "twice as many get on as at the first, and nobody gets off. How many passengers are on the bus then?": (
        lambda start, off, on: start - off + 3 * on,
        {"start": range(25, 41), "off": range(5, 16), "on": range(3, 13)},
    ),
    "Leo reads {pages} pages a day for {days} days, and then {left} pages of the book are left. How many pages "
    "does the book have?": (
        lambda days, pages, left: days * pages + left,
        {"days": range(4, 10), "pages": range(15, 36), "left": range(20, 91)},
    ),
    "A ticket for an adult costs {price} euros, one for a child half as much. How many euros do {adults} adults "
    "and {children} children pay?": (
        lambda adults, price, children: adults * price + children * price // 2,
        {"adults": range(2, 6), "price": range(12, 29, 2), "children": range(2, 7)},
    ),
    "A farm has {hens} hens, and each lays {daily} eggs in a week. Each week the farmer bakes {cakes} cakes with "
    "{each} eggs each and sells all other eggs. How many eggs are sold in a week?": (
        lambda hens, daily, cakes, each: hens * daily - cakes * each,
        {"hens": range(12, 25), "daily": range(2, 4), "cakes": range(2, 5), "each": range(3, 5)},
    ),
    "A rectangular garden is {length} metres long and {width} metres wide. A fence goes all around it, except for "
    "a gate of {gate} metres. How many metres long is the fence?": (
        lambda length, width, gate: 2 * (length + width) - gate,
        {"length": range(12, 31), "width": range(5, 12), "gate": range(1, 5)},
    ),
    "Ella has {own} marbles. Ben has {factor} times as many as Ella, but he loses {lost} of them. How many "
    "marbles do the two have together in the end?": (
        lambda own, factor, lost: own + factor * own - lost,
        {"own": range(11, 26), "factor": range(2, 5), "lost": range(3, 11)},
    ),
    "A train goes {first} hours at {speed} kilometres an hour and then {second} more hours at a speed that is "
    "{slower} kilometres an hour less. How many kilometres does it go in all?": (
        lambda first, speed, second, slower: first * speed + second * (speed - slower),
        {"first": range(2, 5), "speed": range(80, 121, 10), "second": range(1, 4), "slower": range(10, 31, 10)},
    ),
    "Nils bakes {trays} trays of {size} cookies. He gives {each} cookies to each of his {guests} guests. How "
    "many cookies are left?": (
        lambda guests, each, trays, size: trays * size - guests * each,
        {
            "guests": range(4, 10),
            "each": range(3, 7),
            "trays": range(2, 4),
            "size": lambda guests, each, trays: range(guests * each // trays + 2, guests * each // trays + 8),
        },
    ),
}
"""Kinds of word problems by question: function of the answer, and ranges of the numbers."""
