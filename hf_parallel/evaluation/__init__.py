"""What answers are worth: tasks whose answers are known exactly. Stands above generation, knows no model."""

from hf_parallel.evaluation.tasks import TASKS, ArithmeticProblem, PlanningProblem, Problem, RetrievalProblem, Student

__all__ = ["TASKS", "ArithmeticProblem", "PlanningProblem", "Problem", "RetrievalProblem", "Student"]
