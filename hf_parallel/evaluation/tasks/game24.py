r"""Game of 24 (Tree of Thoughts, Yao et al., 2023, section 4.1), checked by exact arithmetic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from hf_parallel.evaluation.grading import final_answer
from hf_parallel.evaluation.tasks.base import Problem, column
from hf_parallel.generation.modes import BOXED

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_EXPRESSION = 100
_LATEX = {
    **dict.fromkeys((r"\times", r"\cdot", "×", "·"), "*"),
    **dict.fromkeys((r"\div", "÷"), "/"),
    **dict.fromkeys((r"\left", r"\right"), ""),
    "−": "-",
}
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


@dataclass(frozen=True)
class Game24Problem(Problem):
    r"""Reach 24 with four numbers, each used once, and `+ - * /`. `answer` has the numbers, with spaces.

    Any correct expression counts.
    """

    name: ClassVar[str] = "game24"
    answer_pattern: ClassVar[str] = BOXED
    source: ClassVar[str] = "test-time-compute/game-of-24::train"

    numbers: tuple[int, ...]

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> Game24Problem:
        """Read `Puzzles`, such as `1 1 4 6` (the paper's `24.csv`), or `numbers`, a list (nlile/24-game)."""
        if "numbers" in row:
            puzzle = row["numbers"]
            if isinstance(puzzle, Sequence) and not isinstance(puzzle, str):
                puzzle = " ".join(map(str, puzzle))
            name = "numbers"
        else:
            puzzle = column(row, "Puzzles")
            name = "Puzzles"
        if not isinstance(puzzle, str) or not re.fullmatch(r"\s*\d{1,3}(\s+\d{1,3}){3}\s*", puzzle):
            raise ValueError(f"column {name!r} must be four integers, such as '1 1 4 6', got {puzzle!r:.80}")
        numbers = tuple(map(int, puzzle.split()))
        prompt = (
            f"Use the numbers {', '.join(map(str, numbers))}, each exactly once, and + - * / with parentheses to reach "
            "24. Give the expression in the end in a box, such as \\boxed{(1 + 2 + 3) * 4}."
        )
        return cls(prompt, " ".join(map(str, numbers)), numbers)

    def score(self, text: str) -> float:
        """Return 1.0 if the expression in the last box uses the numbers and equals 24, otherwise 0.0."""
        plain = final_answer(text)
        if plain is None or len(plain) > MAX_EXPRESSION:
            return 0.0
        for latex, sign in _LATEX.items():
            plain = plain.replace(latex, sign)
        while _FRAC.search(plain):
            plain = _FRAC.sub(r"((\1)/(\2))", plain)
        left, *right = plain.strip("$ ").split("=")
        if right and [part.strip() for part in right] != ["24"]:
            return 0.0
        try:
            used: list[int] = []
            value = evaluate(ast.parse(left.strip(), mode="eval").body, used)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return 0.0
        return float(value == 24 and sorted(used) == sorted(self.numbers))


def evaluate(node: ast.AST, used: list[int]) -> Fraction:
    """Return the exact value of an expression of integers and `+ - * /`, and append its integers to `used`.

    Raises `ValueError` for other expressions.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = evaluate(node.left, used)
        right = evaluate(node.right, used)
        value: Fraction = OPERATORS[type(node.op)](left, right)
        return value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError(f"must have integers and + - * / only, got {type(node).__name__}")
