"""ProblemScore: scores of problems and pass@k as a metric of Hugging Face's `evaluate` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from hf_parallel.evaluation.metrics import pass_at_k
from hf_parallel.evaluation.tasks.base import Problem

try:
    import evaluate
    from datasets import Features, Value
except ImportError as error:
    raise ImportError("ProblemScore needs evaluate and datasets: pip install evaluate datasets") from error


class ProblemScore(evaluate.Metric):
    """Score texts as solutions of problems, without a download.

    Predictions are texts, and the reference of a text is the index of its problem. Several texts of a problem are
    samples of it. `compute` returns the `score`, which is the mean over problems of their mean scores, and `pass@k` for
    each `k`. A text is correct if its score is 1.

    Parameters
    ----------
    problems : sequence of Problem
        Such as those of `load_problems`.
    k : iterable of int
        Numbers of completions of `pass_at_k`.
    **settings
        Arguments of `evaluate.Metric`. `keep_in_memory` is True by default.

    Raises
    ------
    ValueError
        From `compute`, if an index names no problem, or `k` exceeds the number of texts of a problem.

    Examples
    --------
    >>> metric = ProblemScore(load_problems("arithmetic", count=2, num_questions=1))
    >>> metric.compute(predictions=texts, references=[0, 1])
    {'score': 0.5, 'pass@1': 0.5}
    """

    def __init__(self, problems: Sequence[Problem], k: Iterable[int] = (1,), **settings: Any) -> None:
        self.problems = problems
        self.k = tuple(k)
        super().__init__(**{"keep_in_memory": True, **settings})

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Scores of problems: mean over problems of mean scores, and pass@k.",
            citation="Chen et al., Evaluating Large Language Models Trained on Code, 2021",
            inputs_description="predictions: texts; references: indices of their problems.",
            features=Features({"predictions": Value("string"), "references": Value("int64")}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[int]) -> dict[str, float]:
        scores: dict[int, list[float]] = {}  # by problem
        for text, index in zip(predictions, references, strict=True):
            if not 0 <= index < len(self.problems):
                raise ValueError(f"references must be indices of the {len(self.problems)} problems, got {index}")
            score = float(self.problems[index].score(text))
            scores.setdefault(index, []).append(score)
        problem_means = [fmean(of_problem) for of_problem in scores.values()]
        means = {"score": fmean(problem_means)}
        for k in self.k:
            chances = [pass_at_k(len(of_problem), of_problem.count(1.0), k) for of_problem in scores.values()]
            means[f"pass@{k}"] = fmean(chances)
        return means
