"""Metrics of the `evaluate` library for scores of problems. They are made here, without network."""

from __future__ import annotations

from collections import abc

import numpy as np

try:
    import evaluate
    from datasets import Features, Sequence, Value
except ImportError as error:
    raise ImportError("metrics need evaluate and datasets: pip install 'hf_parallel[eval]'") from error


class _LocalMetric(evaluate.Metric):
    """Metric that keeps its values in memory."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**{"keep_in_memory": True, **kwargs})


class MeanScore(_LocalMetric):
    """Mean score of texts for problems, with its standard error.

    Predictions are scores of `Problem.score`, references the weights of the problems, such as 1.0 for each.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Weighted mean of scores from 0 to 1, and its standard error.",
            citation="",
            inputs_description="predictions: scores; references: weights of the problems.",
            features=Features({"predictions": Value("float64"), "references": Value("float64")}),
        )

    def _compute(self, predictions: abc.Sequence[float], references: abc.Sequence[float]) -> dict[str, float]:
        scores, weights = (np.asarray(values, dtype=float) for values in (predictions, references))
        if not len(scores) or weights.sum() <= 0 or weights.min() < 0:
            raise ValueError("mean_score needs scores, and weights that are not negative and not all 0")
        mean = float(np.average(scores, weights=weights))
        shares = weights / weights.sum()
        error = float(np.sqrt((shares**2 * (scores - mean) ** 2).sum() * len(scores) / max(len(scores) - 1, 1)))
        return {"mean_score": mean, "standard_error": error, "count": len(scores)}


class PassAtK(_LocalMetric):
    """Probability that one of k completions is correct, without bias (Chen et al., 2021, section 2.1).

    Predictions have the scores of all completions of a problem; those of at least its reference (1.0) are correct.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="pass@k: mean over problems of 1 - C(n - c, k) / C(n, k), with c of n completions correct.",
            citation="Chen et al., Evaluating Large Language Models Trained on Code, 2021",
            inputs_description="predictions: scores of each problem's completions; references: least correct scores.",
            features=Features({"predictions": Sequence(Value("float64")), "references": Value("float64")}),
        )

    def _compute(
        self,
        predictions: abc.Sequence[abc.Sequence[float]],
        references: abc.Sequence[float],
        k: int | abc.Iterable[int] = (1,),
    ) -> dict[str, float]:
        sizes = [k] if isinstance(k, int) else list(k)
        counts = [len(scores) for scores in predictions]
        for size in sizes:
            if not 1 <= size <= min(counts, default=0):
                raise ValueError(
                    f"k must be from 1 to the least number of completions, {min(counts, default=0)}, got {size}"
                )
        correct = [
            sum(score >= least for score in scores) for scores, least in zip(predictions, references, strict=True)
        ]
        return {
            f"pass@{size}": float(np.mean([pass_at_k(n, c, size) for n, c in zip(counts, correct, strict=True)]))
            for size in sizes
        }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n completions have a correct one if c are correct (Chen et al., 2021)."""
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
