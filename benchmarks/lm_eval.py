"""Compares lm-eval's backends `hf` and `hf-parallel` on one model.

The questions are generated from a seed. Each run is a whole `simple_evaluate` of a loaded model:

- `fixed`: 5-shot multiple choice with four choices of several tokens. All questions have the same examples, as in MMLU.
- `random`: the same with examples drawn for each question, lm-eval's default. Only choices share a prefix.
- `repeats`: a sampled `generate_until` task with `repeats: 8`, the same five examples, and answers of equal length.

Each backend runs with all batch sizes (requests per call), and its fastest run counts. All runs
of a multiple-choice task must have the same scores, and both backends the same greedy texts in the `repeats` task.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_parallel.evaluation.lm_eval import ParallelLM

BACKENDS = {"hf": HFLM, "hf-parallel": ParallelLM}
LIMITS = {"fixed": 3.0, "random": 3.0, "repeats": 4.0}
"""Least ratio of the seconds of `hf` to those of `hf-parallel`, by task."""
TARGETS = (
    *((name, "at least", least, f"{name}: hf by hf-parallel") for name, least in LIMITS.items()),
    *((f"{name} same", "at least", 1.0, f"{name}: same scores or texts") for name in LIMITS),
)
SIZES: dict[str, Any] = {"questions": 12, "prompts": 4, "new_tokens": 32, "batch_sizes": (1, 4, 16)}
QUICK: dict[str, Any] = {"questions": 2, "prompts": 1, "new_tokens": 4, "batch_sizes": (1, 4)}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lagoon")
PLACES = ("by the old mill", "under the stone bridge", "behind the harbour wall", "near the northern gate")


def question(rng: random.Random) -> dict[str, Any]:
    """Return a question about a list of words with their places, and four choices of several tokens."""
    words, places, gold = rng.sample(WORDS, 4), rng.sample(PLACES, 4), rng.randrange(4)
    listed = "; ".join(f"the {word} box is {place}" for word, place in zip(words, places, strict=True))
    text = f"There are four boxes: {listed}. Where would you find the {words[gold]} box?"
    return {"question": text, "choices": [f"It is {place}" for place in places], "gold": gold}


def task_of(name: str, count: int, new_tokens: int) -> dict[str, Any]:
    """Return the configuration of a task with `count` questions."""
    rng = random.Random(0)
    splits = {split: [question(rng) for _ in range(n)] for split, n in (("examples", 40), ("test", count))}
    task: dict[str, Any] = {
        "task": name,
        "custom_dataset": lambda **_: {split: Dataset.from_list(rows) for split, rows in splits.items()},
        **{"test_split": "test", "fewshot_split": "examples", "num_fewshot": 5},
        "doc_to_text": "Question: {{question}}\nAnswer:",
        **({} if name == "random" else {"fewshot_config": {"sampler": "first_n"}}),
    }
    if name != "repeats":
        choices = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
        metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
        return task | choices | {"output_type": "multiple_choice", "metric_list": metrics}
    length = {"max_gen_toks": new_tokens, "min_new_tokens": new_tokens}
    return task | {
        **{"output_type": "generate_until", "doc_to_target": "{{choices[gold]}}", "repeats": 8},
        "generation_kwargs": {"until": ["\n\n\n\n"], "do_sample": True, "temperature": 0.7, **length},
        "metric_list": [{"metric": "exact_match"}],
    }


def evaluate(cls: Any, model: Any, tokenizer: Any, task: dict[str, Any], size: int, **settings: Any) -> dict[str, Any]:
    """Run a task on one backend; return its seconds, scores and raw answers."""
    began = time.perf_counter()
    lm = cls(model, tokenizer=tokenizer, batch_size=size)
    manager = TaskManager(include_defaults=False)
    found: Any = simple_evaluate(lm, tasks=[dict(task)], task_manager=manager, bootstrap_iters=0, **settings)
    seconds = time.perf_counter() - began
    samples = sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    raw = [answer for sample in samples for repeats in sample["resps"] for answer in repeats]
    answers = [answer[0] if isinstance(answer, tuple) else answer for answer in raw]
    scores = {name: v for name, v in found["results"][task["task"]].items() if isinstance(v, int | float)}
    return {"batch_size": size, "seconds": seconds, "scores": scores, "answers": answers}


def measure(name: str, model: Any, tokenizer: Any, count: int, new_tokens: int, sizes: tuple[int, ...]) -> Any:
    """Run a task on both backends with all batch sizes; return the entry of the report."""
    task = task_of(name, count, new_tokens)
    for cls in BACKENDS.values():  # warms up
        evaluate(cls, model, tokenizer, task, 1, limit=1)
    runs: dict[str, list[Any]] = {backend: [] for backend in BACKENDS}
    for size in sizes:
        for backend, cls in BACKENDS.items():
            runs[backend].append(evaluate(cls, model, tokenizer, task, size))
    fastest = {backend: min(run["seconds"] for run in of) for backend, of in runs.items()}
    if name == "repeats":
        greedy = task | {"repeats": 1, "generation_kwargs": task["generation_kwargs"] | {"do_sample": False}}
        compared = [evaluate(cls, model, tokenizer, greedy, 1)["answers"] for cls in BACKENDS.values()]
    else:
        compared = [run["scores"] for of in runs.values() for run in of]
    same = all(one == compared[0] for one in compared)
    return {"runs": runs, "ratio": fastest["hf"] / fastest["hf-parallel"], "same": same}


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    logging.disable(logging.WARNING)  # of lm-eval, about models that it did not load itself
    disable_progress_bar()
    counts = {name: sizes.prompts if name == "repeats" else sizes.questions for name in LIMITS}
    found: dict[str, Any] = {
        name: measure(name, model, tokenizer, count, sizes.new_tokens, sizes.batch_sizes)
        for name, count in counts.items()
    }
    ratios = {name: entry["ratio"] for name, entry in found.items()}
    return found | {"ratios": ratios | {f"{name} same": float(entry["same"]) for name, entry in found.items()}}
