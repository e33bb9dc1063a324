"""`python -m benchmarks.lm_eval`: its ratios, and that both backends answer alike."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from small_tokenizers import small_llama

pytest.importorskip("lm_eval")

from benchmarks import lm_eval as benchmark

pytestmark = pytest.mark.usefixtures("one_thread")


def test_both_backends_run_all_tasks_and_answer_alike(embedded: tuple[Any, Any]) -> None:
    tokenizer = copy.deepcopy(embedded[1])
    model = small_llama(tokenizer, initializer_range=0.3)
    small = benchmark.LmEvalBenchmark(questions=2, prompts=1, new_tokens=3, batch_sizes=(2,))
    report = small.run(model, tokenizer, lambda words: None)
    assert all(report[name]["same"] for name in benchmark.TARGETS)
    for name in ("fixed", "random"):
        assert report[name]["difference"] < 1e-3
        assert all(len(run["answers"]) == 8 for run in report[name]["runs"]["hf"])
    sampled = report["repeats"]["runs"]["hf-parallel"][0]
    assert len(sampled["answers"]) == sampled["stats"]["decoded_tokens"] / 3 == benchmark.REPEATS
    assert {target["what"].split(":")[0] for target in benchmark.targets(report)} == set(benchmark.TARGETS)


def test_the_fastest_batch_size_counts() -> None:
    runs = [{"batch_size": size, "seconds": seconds} for size, seconds in ((1, 3), (4, 2), (1, 1), (4, 2), (1, 9))]
    assert benchmark.fastest(runs) == {"batch_size": 4, "seconds": 2, "by_batch_size": {1: 3, 4: 2}}


def test_the_right_choice_of_a_question_is_in_its_text() -> None:
    for seed in range(20):
        question = benchmark.question(random.Random(seed))
        place = question["choices"][question["gold"]].removeprefix("It is ")
        word = question["question"].split("find the ")[1].split(" box")[0]
        assert f"the {word} box is {place}" in question["question"]
