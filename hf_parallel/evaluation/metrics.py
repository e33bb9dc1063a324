"""Metrics of several completions of a problem."""

from __future__ import annotations

from collections import abc
from math import comb

import numpy as np

try:
    import evaluate
    from datasets import Features, Sequence, Value
except ImportError as error:
    raise ImportError("metrics need evaluate and datasets: pip install 'hf_parallel[eval]'") from error


class PassAtK(evaluate.Metric):
    """`pass_at_k` as a metric of the `evaluate` library, without a download.

    A prediction holds the scores of a problem's completions. A completion is correct if its score is at least the
    problem's reference, such as 1.0.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**{"keep_in_memory": True, **kwargs})

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
    """Estimate the probability that at least one of k completions is correct, from n completions with c correct ones.

    The estimate 1 - C(n - c, k) / C(n, k) is unbiased (Chen et al., 2021, section 2.1). Raises `ValueError` unless
    `0 <= c <= n` and `1 <= k <= n`.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - comb(n - c, k) / comb(n, k)
