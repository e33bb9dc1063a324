r"""Final answers of texts and their comparison: `\boxed{}`, numbers, formulas (math-verify), outputs of programs.

Texts of a model may be hostile. All functions take linear time, and formulas are compared in a separate process with
limits on time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from hf_parallel.evaluation.formulas import compare_formulas
from hf_parallel.evaluation.quantity import MAX_ANSWER, THOUSANDS, read_number
from hf_parallel.generation.modes import normal_form

SCALES = (1, 100, Fraction(1, 100))
"""A number, and what it is as a percentage or a fraction."""
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_SPACED_LIST = re.compile(r",\s")


def boxed(text: str) -> list[str]:
    r"""Return the contents of all `\boxed{...}` with balanced braces, also nested ones, in the order of their ends."""
    contents = []
    open_braces = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token[-1] == "{" and token != "\\{":
            open_braces.append(match.end() if len(token) > 1 else -1)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start >= 0:
                content = text[start : match.start()] if match.start() - start <= MAX_ANSWER else ""
                contents.append(content.strip())
    return contents


def final_answer(text: str) -> str | None:
    r"""Return the last non-blank `\boxed{}`, else the rest of the line after the last `####` (GSM8K), or None."""
    answers = [answer for answer in boxed(text) if answer]
    if not answers:
        answers = [line.strip() for line in _HASHES.findall(text)]
    answer = next(filter(None, reversed(answers)), None)
    if answer is None:
        return None
    inner = boxed(answer)
    while inner and inner[-1]:
        answer = inner[-1]
        inner = boxed(answer)
    return answer if len(answer) <= MAX_ANSWER else None


def numbers_equal(answer: str, given: str | None) -> bool:
    """Return whether two answers are the same number."""
    value = read_number(given)
    return value is not None and value == read_number(answer)


def score_by_position(text: str, answers: Sequence[str], units: bool = False) -> float:
    r"""Return the fraction of correct answers, compared by position (Hogwild! Inference, section 4.1).

    If the last `\boxed{}` has several answers, only these are scored; more answers than questions score 0.0. Otherwise
    the last boxes with a single answer are scored, one per question. With `units`, numbers are compared by value (see
    `read_number`), and commas between digits are part of numbers if a comma and a space separate the answers.
    """
    boxes = [_items(box, units) for box in boxed(text) if box]
    if boxes and len(boxes[-1]) > 1:
        given_answers = boxes[-1]
    else:
        single = [box[0] for box in boxes if len(box) == 1]
        given_answers = single[-len(answers) :]
    if len(given_answers) > len(answers):
        return 0.0
    equal = numbers_equal if units else _forms_equal
    correct = sum(equal(answer, given_answer) for given_answer, answer in zip(given_answers, answers, strict=False))
    return correct / len(answers)


def _items(box: str, units: bool) -> list[str]:
    if units:
        plain = re.sub(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3}(?!\d))", "", box)
        box = THOUSANDS.sub("", plain) if _SPACED_LIST.search(plain) else plain
    return box.split(",")


def _forms_equal(answer: str, given: str) -> bool:
    return normal_form(given) == normal_form(answer)


def formulas_equal(answer: str, given: str | None, tolerance: float = 0.0) -> bool:
    """Return whether two formulas in LaTeX are equal. Lists, separated by commas, are compared in any order.

    Equal texts and integers are compared here, all others by math-verify. With a `tolerance`, numbers may differ by it
    and are also compared as percentages, so that 0.6 equals 60: the rule of OlympiadBench (`auto_scoring_judge.py`).

    Raises `ImportError` if math-verify is needed and not installed.
    """
    if given is None or not given.strip() or len(given) > MAX_ANSWER:
        return False
    if _forms_equal(answer, given):
        return True
    value = read_number(answer, units=False)
    given_value = read_number(given, units=False)
    if value is not None and given_value is not None:
        scales = SCALES if tolerance else SCALES[:1]
        if any(abs(value * scale - given_value) <= tolerance * 1.01 for scale in scales):
            return True
        if value.denominator == given_value.denominator == 1:
            return False
    return compare_formulas(answer.strip("$ \n"), given.strip("$ \n"), tolerance)


def outputs_equal(expected: str, given: str) -> bool:
    """Return whether two outputs of a program are equal by the rules of LiveCodeBench (`testing_util.py`).

    Stripped outputs must have the same number of lines. Stripped lines must be equal, or consist of equal decimal
    numbers.
    """
    expected_lines = [line.strip() for line in expected.strip().split("\n")]
    given_lines = [line.strip() for line in given.strip().split("\n")]
    if len(expected_lines) != len(given_lines):
        return False
    return all(map(_lines_equal, expected_lines, given_lines))


def _lines_equal(line: str, other: str) -> bool:
    if line == other:
        return True
    try:
        numbers = list(map(Decimal, line.split()))
        other_numbers = list(map(Decimal, other.split()))
        return numbers == other_numbers
    except InvalidOperation:
        return False
