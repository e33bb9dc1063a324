"""Evaluation: tasks with exact answers."""

from hf_parallel.evaluation.tasks import TASKS, ArithmeticProblem, PlanningProblem, Problem, RetrievalProblem, Student

__all__ = ["TASKS", "ArithmeticProblem", "PlanningProblem", "Problem", "RetrievalProblem", "Student"]
