"""Evaluation: tasks of the papers with their grading, and accuracy against budgets of forward passes.

`sweep.sweep` runs a comparison, and `lm_eval` is a backend of lm-evaluation-harness.
"""

from hf_parallel.evaluation.results import format_table, read_results, table
from hf_parallel.evaluation.runs import Finisher, Run
from hf_parallel.evaluation.tasks import (
    GENERATED,
    TASKS,
    ArithmeticProblem,
    CodeProblem,
    NeedleProblem,
    PlanningProblem,
    Problem,
    RetrievalProblem,
    Student,
    Test,
    load_problems,
)

__all__ = [
    "GENERATED",
    "TASKS",
    "ArithmeticProblem",
    "CodeProblem",
    "Finisher",
    "NeedleProblem",
    "PlanningProblem",
    "Problem",
    "RetrievalProblem",
    "Run",
    "Student",
    "Test",
    "format_table",
    "load_problems",
    "read_results",
    "table",
]
