"""Tasks: answers are recomputed from the prompts alone, texts are scored; prompts of Chain of Draft."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from hf_parallel.evaluation import GENERATED, ArithmeticProblem, PlanningProblem, RetrievalProblem

SEEDS = range(40)


# All of them


@pytest.mark.parametrize("name", GENERATED)
def test_an_empty_text_and_the_prompt_score_nothing(name: str) -> None:
    for seed in SEEDS:
        problem = GENERATED[name].make(seed)
        assert problem.score("") == 0.0
        assert problem.score(problem.prompt) == 0.0


# Retrieval


@pytest.mark.parametrize("count", [2, 10, 100])
def test_exactly_one_student_is_in_the_range(count: int) -> None:
    for seed in SEEDS:
        problem = RetrievalProblem.make(seed, count)
        students = re.findall(r"^(.+) is \d+ years old, .+ has a GPA of (\d\.\d\d)\.", problem.prompt, re.MULTILINE)
        low, high = re.findall(r"between (\d\.\d\d) and (\d\.\d\d)", problem.prompt)[0]
        assert len({name for name, _ in students}) == len({gpa for _, gpa in students}) == count
        inside = [name for name, gpa in students if Fraction(low) <= Fraction(gpa) <= Fraction(high)]
        assert inside == [problem.answer]
        assert {low, high}.isdisjoint(gpa for _, gpa in students)
        assert problem.score(f"Name: {inside[0]}") == 1.0


# Arithmetic

SOLUTIONS: dict[str, Callable[..., Any]] = {
    r"gets (\d+) crates of (\d+) apples. It throws (\d+) rotten": lambda n, m, bad: n * m - bad,
    r"has (\d+) euros. She saves (\d+) euros a week for (\d+) weeks and then spends (\d+)": (
        lambda held, weekly, weeks, spent: held + sum([weekly] * weeks) - spent
    ),
    r"with (\d+) passengers. At the first stop (\d+) get off and (\d+) get on. At the second stop twice as many": (
        lambda start, off, on: start - off + on + 2 * on
    ),
    r"reads (\d+) pages a day for (\d+) days, and then (\d+) pages of the book are left": lambda n, d, r: n * d + r,
    r"an adult costs (\d+) euros, one for a child half as much. How many euros do (\d+) adults and (\d+) children": (
        lambda price, adults, children: Fraction(price) * adults + Fraction(price, 2) * children
    ),
    r"has (\d+) hens, and each lays (\d+) eggs in a week. Each week the farmer bakes (\d+) cakes with (\d+) eggs": (
        lambda hens, daily, cakes, each: hens * daily - cakes * each
    ),
    r"is (\d+) metres long and (\d+) metres wide. .+ a gate of (\d+) metres": lambda a, b, gate: a + b + a + b - gate,
    r"has (\d+) marbles. Ben has (\d+) times as many as Ella, but he loses (\d+)": lambda n, k, lost: (
        n + (n * k - lost)
    ),
    r"goes (\d+) hours at (\d+) kilometres an hour and then (\d+) more hours at a speed that is (\d+) kilometres": (
        lambda first, speed, second, less: first * speed + second * (speed - less)
    ),
    r"bakes (\d+) trays of (\d+) cookies. He gives (\d+) cookies to each of his (\d+) guests": (
        lambda trays, size, each, guests: trays * size - each * guests
    ),
}
"""Solution of each kind of question, from the numbers in its text."""


def solve(question: str) -> int:
    """Return the answer to a question, computed from its text alone."""
    solved = [(found, solution) for text, solution in SOLUTIONS.items() if (found := re.search(text, question))]
    assert len(solved) == 1, question
    found, solution = solved[0]
    numbers = [int(number) for number in found.groups()]
    assert sorted(numbers) == sorted(map(int, re.findall(r"\d+", question))), "a number is not used"
    answer = Fraction(solution(*numbers))
    assert answer.denominator == 1
    return int(answer)


@pytest.mark.parametrize("count", [1, 5, 10])
def test_answers_match_the_questions_in_the_prompt(count: int) -> None:
    for seed in SEEDS:
        problem = ArithmeticProblem.make(seed, count)
        questions = re.findall(r"^\d+\. (.+)$", problem.prompt, re.MULTILINE)
        answers = [solve(question) for question in questions]
        assert len({re.sub(r"\d+", "", question) for question in questions}) == count
        assert problem.answer == ",".join(map(str, answers))
        assert all(0 < answer < 1000 for answer in answers)
        assert f"\\boxed{{{','.join(f'answer{i + 1}' for i in range(count))}}}" in problem.prompt
        assert problem.score(f"Therefore \\boxed{{{problem.answer}}}.") == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("\\boxed{{{0},{1},{2},{3},{4}}}", 1.0),
        ("\\boxed{{ {0}, {1}, ${2}$, {3}.0, {4} }}", 1.0),
        ("\\boxed{{1,2,3,4,5}} no: \\boxed{{{0},{1},{2},{3},{4}}}", 1.0),
        ("\\boxed{{{0},{1},{2},{3},{4}}} no: \\boxed{{0,0,0,0,0}}", 0.0),
        ("\\boxed{{{0},0,{2},0,{4}}}", 0.6),
        ("\\boxed{{{0},{1}}}", 0.4),
        ("\\boxed{{{0},{1},{2},{3},{4},7}}", 0.0),
        ("\\boxed{{{0}}} \\boxed{{{1}}} \\boxed{{{2}}} \\boxed{{{3}}} \\boxed{{{4}}}", 1.0),
        ("\\boxed{{7}} \\boxed{{{0}}} \\boxed{{{1}}} \\boxed{{{2}}} \\boxed{{{3}}} \\boxed{{{4}}}", 1.0),
        ("\\boxed{{{0},{1},{2},{3},{4}", 0.0),
        ("{0},{1},{2},{3},{4}", 0.0),
    ],
)
def test_answers_are_compared_by_position(text: str, score: float) -> None:
    problem = next(p for p in map(ArithmeticProblem.make, SEEDS) if len(set(p.answers)) == 5 and 7 not in p.answers)
    assert problem.score(text.format(*problem.answers)) == pytest.approx(score)


# Planning


def test_the_score_is_the_fraction_of_aspects_with_a_heading() -> None:
    problem = PlanningProblem.make(0)
    first, second, *others = problem.aspects
    text = "\n".join(f"## {aspect}\nSo be it." for aspect in others)
    assert problem.score(text) == pytest.approx(0.6)
    assert problem.score(f"{text}\n## {first} and {second}\nThink of {first}.\nthe {second}: it") == pytest.approx(0.6)
    assert problem.score(f"{text}\n## {first}\n## {first}") == pytest.approx(0.8)
