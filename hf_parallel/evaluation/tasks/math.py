r"""Mathematics: GSM8K, GSM8Kx5, LIMO, MATH-500, AIME 2025 and OlympiadBench.

The prompts ask for the final answer in `\boxed{}`. Hogwild! Inference uses all but MATH-500 (sections 4.1, 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.evaluation.grading import final_answer, formulas_equal, numbers_equal, score_by_position
from hf_parallel.evaluation.quantity import read_number
from hf_parallel.evaluation.tasks.base import Problem, column, text_column
from hf_parallel.generation.modes import BOXED

SOLVE = "Solve this problem step by step and give the final answer in \\boxed{}.\n\n"


@dataclass(frozen=True)
class GSM8KProblem(Problem):
    r"""A word problem of GSM8K (Cobbe et al., 2021), whose answer is a number.

    Compares the last `\boxed{}` by value, or else the rest of the line after the last `####`, as in the solutions.
    """

    name: ClassVar[str] = "gsm8k"
    answer_pattern: ClassVar[str] = BOXED
    source: ClassVar[str] = "openai/gsm8k:main:test"

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> GSM8KProblem:
        """Read `question` and `answer`, a solution that ends with `#### number`."""
        return cls(SOLVE + text_column(row, "question"), _gsm8k_answer(row))

    def score(self, text: str) -> float:
        """Return 1.0 if the final answer is the number, whatever its unit, otherwise 0.0."""
        return float(numbers_equal(self.answer, final_answer(text)))


@dataclass(frozen=True)
class GSM8Kx5Problem(Problem):
    """Five problems of GSM8K in one prompt (Hogwild! Inference, section 4.1). `answer` has the numbers, with commas.

    Consecutive rows make a problem, so no question is used twice.
    """

    name: ClassVar[str] = "gsm8kx5"
    answer_pattern: ClassVar[str] = BOXED
    source: ClassVar[str] = GSM8KProblem.source
    rows_per_problem: ClassVar[int] = 5

    answers: tuple[str, ...]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, object]]) -> GSM8Kx5Problem:
        """Read `question` and `answer` of five rows."""
        if len(rows) != cls.rows_per_problem:
            raise ValueError(f"{cls.name} needs {cls.rows_per_problem} rows for a problem, got {len(rows)}")
        answers = tuple(_gsm8k_answer(row) for row in rows)
        names = []
        questions = []
        for number, row in enumerate(rows, start=1):
            names.append(f"answer{number}")
            questions.append(f"{number}. {text_column(row, 'question')}")
        form = ", ".join(names)
        prompt = f"Solve these problems and give all answers in the end, separated by commas: \\boxed{{{form}}}.\n\n"
        return cls(prompt + "\n".join(questions), ",".join(answers), answers)

    def score(self, text: str) -> float:
        """Return the fraction of correct answers, compared by position; see `grading.score_by_position`."""
        return score_by_position(text, self.answers, units=True)


@dataclass(frozen=True)
class FormulaProblem(Problem):
    r"""A problem whose answer is a number or a formula. math-verify compares the last `\boxed{}`."""

    answer_pattern: ClassVar[str] = BOXED
    finisher_tokens: ClassVar[int] = 64

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> FormulaProblem:
        """Read `problem` (in some datasets and copies: `question`) and `answer`."""
        name = "question" if "problem" not in row and "question" in row else "problem"
        return cls(SOLVE + text_column(row, name), text_column(row, "answer"))

    def score(self, text: str) -> float:
        return float(formulas_equal(self.answer, final_answer(text)))


@dataclass(frozen=True)
class LIMOProblem(FormulaProblem):
    """A problem of LIMO (Ye et al., 2025): 817 problems that need long reasoning."""

    name: ClassVar[str] = "limo"
    source: ClassVar[str] = "GAIR/LIMO::train"


@dataclass(frozen=True)
class MATH500Problem(FormulaProblem):
    """A problem of MATH-500: 500 problems of MATH (Hendrycks et al., 2021), chosen by Lightman et al. (2023)."""

    name: ClassVar[str] = "math500"
    source: ClassVar[str] = "HuggingFaceH4/MATH-500::test"


@dataclass(frozen=True)
class AIME25Problem(FormulaProblem):
    """A problem of AIME 2025: 30 problems, whose answers are integers from 0 to 999."""

    name: ClassVar[str] = "aime25"
    source: ClassVar[str] = "math-ai/aime25::test"

    def score(self, text: str) -> float:
        """Return 1.0 if the final answer is the integer, otherwise 0.0."""
        return float(numbers_equal(self.answer, final_answer(text)))


@dataclass(frozen=True)
class OlympiadBenchProblem(FormulaProblem):
    """An open problem of OlympiadBench (He et al., 2024), text only, with one or several answers.

    `answer` has all of them, separated by commas. As in the authors' grader, numbers may differ by `tolerance` and also
    count as percentages.
    """

    name: ClassVar[str] = "olympiadbench"
    source: ClassVar[str] = "Hothan/OlympiadBench:OE_TO_maths_en_COMP:train"

    tolerance: float = 1e-8

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> OlympiadBenchProblem:
        """Read `question`, `final_answer` (a list), and if present `context`, `unit`, `is_multiple_answer`, `error`."""
        answers = column(row, "final_answer")
        answers = [answers] if isinstance(answers, str) else answers
        if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
            raise ValueError(f"column 'final_answer' must be a list of texts, got {answers!r:.80}")
        form = "all answers, separated by commas" if row.get("is_multiple_answer") else "answer"
        unit = f" Give it without its unit ({row['unit']})." if row.get("unit") else ""
        context = ""
        if row.get("context"):
            context = str(row["context"]).strip() + "\n"
        prompt = (
            "Solve this problem of an olympiad step by step. Write formulas in LaTeX. End with the sentence: So the "
            f"final answer is \\boxed{{{form}}}.{unit}\n\n{context}{text_column(row, 'question')}"
        )
        answer = ", ".join(part.strip("$ ") for part in answers)
        return cls(prompt, answer, _tolerance(row.get("error")))

    def score(self, text: str) -> float:
        """Return 1.0 if the final answer has exactly the correct answers, otherwise 0.0."""
        return float(formulas_equal(self.answer, final_answer(text), self.tolerance))


def _gsm8k_answer(row: Mapping[str, object]) -> str:
    solution = text_column(row, "answer")
    value = final_answer(solution) if "####" in solution else solution
    if read_number(value) is None:
        raise ValueError(f"column 'answer' must end with '#### ' and a number, got {solution[-80:]!r}")
    assert value is not None
    return value.replace(",", "")


def _tolerance(error: object) -> float:
    """Return the largest error bound of a text such as `1e-2` or `0.5,0.1`."""
    try:
        parts = str(error or "").split(",")
        return max((float(part) for part in parts if part.strip()), default=1e-8)
    except ValueError:
        raise ValueError(f"column 'error' must be numbers, separated by commas, got {error!r:.80}") from None
