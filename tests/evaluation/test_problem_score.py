"""ProblemScore in the `evaluate` library: compute, combine, and a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_parallel.evaluation import load_problems
from hf_parallel.evaluation.tasks.base import Problem

evaluate = pytest.importorskip("evaluate")

PROBLEMS = load_problems("arithmetic", count=2, num_questions=1)
RIGHT = [f"\\boxed{{{problem.answer}}}" for problem in PROBLEMS]


class Equal(Problem):
    """A problem whose only solution is its answer."""

    def score(self, text: str) -> float:
        return float(text == self.answer)


def problem_score(*args: Any, **settings: Any) -> Any:
    from hf_parallel.evaluation.problem_score import ProblemScore

    return ProblemScore(*args, **settings)


def test_texts_of_a_problem_are_samples_of_it() -> None:
    metric = problem_score(PROBLEMS, k=(1, 2))
    texts = [RIGHT[0], "no", "no", RIGHT[0], RIGHT[1], "no"]
    computed = metric.compute(predictions=texts, references=[0, 0, 0, 0, 1, 1])
    # problem 0: 2 of 4 correct, pass@2 = 1 - C(2, 2) / C(4, 2); problem 1: 1 of 2, pass@2 = 1
    assert computed == pytest.approx({"score": 0.5, "pass@1": 0.5, "pass@2": (5 / 6 + 1) / 2})


def test_invalid_references_and_k_raise() -> None:
    with pytest.raises(ValueError, match="indices of the 2 problems, got 2"):
        problem_score(PROBLEMS).compute(predictions=["no"], references=[2])
    with pytest.raises(ValueError, match="k=3"):
        problem_score(PROBLEMS, k=[3]).compute(predictions=["no"], references=[0])


def test_it_combines_with_itself_over_other_numbers_of_samples() -> None:
    both = evaluate.combine([problem_score(PROBLEMS), problem_score(PROBLEMS, k=(2,))], force_prefix=True)
    computed = both.compute(predictions=[RIGHT[0], "no"], references=[0, 0])
    assert {value for name, value in computed.items() if "pass@2" in name} == {1.0}
    assert sorted(computed.values()) == [0.5, 0.5, 0.5, 1.0]


def test_a_trainer_reports_it(tmp_path: Path) -> None:
    from transformers import EvalPrediction, Trainer, TrainingArguments

    class Echo(torch.nn.Module):
        """Answers the first problem, whatever it is asked."""

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": x.sum() * 0.0, "logits": torch.zeros(len(x), 1)}

    metric = problem_score([Equal("", "0"), Equal("", "1")])

    def compute_metrics(outputs: EvalPrediction) -> dict[str, float]:
        texts = [str(int(value)) for value in np.ravel(outputs.predictions)]
        return metric.compute(predictions=texts, references=range(len(texts)))

    rows = [{"x": torch.zeros(1), "labels": torch.tensor(0)} for _ in range(2)]
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(Echo(), arguments, eval_dataset=rows, compute_metrics=compute_metrics)
    assert trainer.evaluate()["eval_score"] == 0.5
