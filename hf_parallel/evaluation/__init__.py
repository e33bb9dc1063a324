"""Evaluation: tasks of the papers with their grading, and accuracy against budgets of forward passes.

`sweep.sweep` runs a comparison, and `lm_eval` is a backend of lm-evaluation-harness.
"""

from hf_parallel.evaluation.results import format_table, read_results, table
from hf_parallel.evaluation.runs import Finisher, Run
from hf_parallel.evaluation.tasks import GENERATED, TASKS, load_problems
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.evaluation.tasks.code import CodeProblem, Test
from hf_parallel.evaluation.tasks.generated import ArithmeticProblem, PlanningProblem, RetrievalProblem

__all__ = [
    "GENERATED",
    "TASKS",
    "ArithmeticProblem",
    "CodeProblem",
    "Finisher",
    "PlanningProblem",
    "Problem",
    "RetrievalProblem",
    "Run",
    "Test",
    "format_table",
    "load_problems",
    "read_results",
    "table",
]
