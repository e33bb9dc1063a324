"""Accuracy of `search`, votes and `best_of` on Countdown, by decode passes and by tokens, with a small trained model.

Every way solves the same held-out problems, each in a request to an engine, which counts its own passes and tokens.
The model is trained the first time, and kept in the folder `--model` or in the cache folder; `benchmarks/countdown.py`
has the task.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import hf_parallel
from hf_parallel import SelfConsistencyOutput
from hf_parallel.engine import Engine, RequestHandle
from hf_parallel.files import cache_folder
from hf_parallel.progress import progress_bar

from . import countdown
from .countdown import ANSWER_PATTERN, BOUNDARY, HELD_OUT, PROBE_PROMPT, Problem, check, is_right, look_ahead

SIZES: dict[str, Any] = {
    "numbers": 3,
    "highest": 20,
    "hidden_size": 160,
    "layers": 4,
    "training_steps": 500,
    "problems": 200,
    "repeats": 1,
    "rows": 256,
    "widths": (4, 8, 16),
    "seed": 0,
}
QUICK: dict[str, Any] = {
    "numbers": 3,
    "highest": 5,
    "hidden_size": 32,
    "layers": 1,
    "training_steps": 8,
    "problems": 2,
    "widths": (3,),
}
"""Problems have `numbers` numbers from 1 to `highest`. Each of the `problems` is solved `repeats` times by each way. At
most `rows` candidates decode at once."""
MAX_NEW_TOKENS = 48
WINDOW = 6
"""Tokens of a group of confidences: those of a line."""
TEMPERATURES = {"log_prob": 0.1, "confidence": 1.0, "check": 0.1}
"""`selection_temperature` of the particle filters, by score."""
SELECTS = ("top", "tournament", "systematic")
TOGETHER = 4
"""Problems that are submitted at once, each with all ways and widths."""
KV_BYTES = 1 << 29
"""Memory of the engine for keys and values."""
RESAMPLES = 2000
"""Bootstrap samples of an interval."""


def ways(width: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of each way of the same width."""
    search = {"generation_mode": "search", "width": width, "boundary": BOUNDARY, "answer_pattern": ANSWER_PATTERN}
    best_of = {"generation_mode": "best_of", "num_candidates": width}
    scores: dict[str, dict[str, Any]] = {
        "log_prob": {"score": "log_prob"},
        "confidence": {"score": "confidence", "confidence_window": WINDOW},
        "check": {"scorer": check},
    }
    independent = {**search, "select": "top", "keep": width, "choose": "vote"}
    found: dict[str, dict[str, Any]] = {
        "vote": {"generation_mode": "self_consistency", "num_answers": width, "answer_pattern": ANSWER_PATTERN},
        "best_of log_prob": best_of,
        "best_of check": {**best_of, "scorer": check},
        "vote until consensus": {**independent, "stop_on": "consensus", "probe_prompt": PROBE_PROMPT},
    }
    for score, settings in scores.items():
        for select in SELECTS:
            given = {**search, **settings, "select": select}
            if select == "systematic":
                given["selection_temperature"] = TEMPERATURES[score]
            found[f"search {select} {score}"] = given
    found["search top look_ahead"] = {**search, "scorer": look_ahead}
    filter_of = found["search systematic log_prob"]
    found["search systematic log_prob + vote"] = {**filter_of, "choose": "vote"}
    consensus = {"stop_on": "consensus", "probe_prompt": PROBE_PROMPT}
    found["search top log_prob until consensus"] = {**found["search top log_prob"], **consensus}
    return found


def load(options: Any) -> tuple[Any, Any]:
    """Return the trained model and its tokenizer; train the model if its folder does not exist."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    sizes = SIZES | (QUICK if options.quick else {})
    sizes |= {name: value for name, value in vars(options).items() if name in SIZES and value is not None}
    shape = [sizes[name] for name in ("numbers", "highest", "hidden_size", "layers", "training_steps")]
    folder = None
    if options.model:
        folder = Path(options.model)
    elif not options.quick:
        folder = cache_folder() / f"countdown-{'-'.join(map(str, shape))}"
    numbers, highest, hidden_size, layers, steps = shape
    problems = countdown.all_problems(numbers, highest)
    held_out = min(HELD_OUT, len(problems) // 2)
    model, training = countdown.load_or_train(folder, problems[held_out:], hidden_size, layers, steps, seed=0)
    options.model = f"Countdown model of {model.num_parameters() / 1e6:.2f} million parameters, trained here"
    model.training_figures = training
    return hf_parallel.enable(model), countdown.make_tokenizer()


class Solver:
    """Solves problems with an engine."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def submit(self, problem: Problem, generation_mode: str, **settings: Any) -> RequestHandle:
        """Submit a problem."""
        prompt = f"<s>{countdown.write_prompt(problem)}"
        ids = self.tokenizer([prompt], return_token_type_ids=False, return_tensors="pt").input_ids
        return self.engine.submit(ids, generation_mode, max_new_tokens=MAX_NEW_TOKENS, **settings)

    def figures(self, problem: Problem, handle: RequestHandle) -> dict[str, Any]:
        """Return whether the answer of a request is right, and what it took."""
        out = handle.result()
        text = out.answer_texts(self.tokenizer)[0]
        figures = {
            "right": is_right(text, problem.numbers, problem.target),
            "passes": out.stats.forward_passes,
            "tokens": out.stats.decoded_tokens,
            "text": text,
        }
        if isinstance(out, SelfConsistencyOutput):
            right = [is_right(sample, problem.numbers, problem.target) for sample in out.texts[0]]
            figures |= {"right_samples": statistics.mean(right), "any_right": any(right)}
        return figures


def interval(values: np.ndarray) -> dict[str, float]:
    """Return the mean of a value per problem, and its 95% interval by bootstrap over the problems."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


class Measured:
    """What each way did on each problem, by width."""

    def __init__(self, num_problems: int) -> None:
        self.num_problems = num_problems
        self.runs: dict[tuple[str, int], list[list[dict[str, Any]]]] = {}  # [problem][repeat]

    def add(self, way: str, width: int, problem: int, figures: dict[str, Any]) -> None:
        """Add a run."""
        of_way = self.runs.setdefault((way, width), [[] for _ in range(self.num_problems)])
        of_way[problem].append(figures)

    def per_problem(self, way: str, width: int, name: str) -> np.ndarray:
        """Return the mean of a figure over the repeats, float64 `[problems]`."""
        runs = self.runs[way, width]
        return np.array([statistics.mean(float(figures[name]) for figures in of_problem) for of_problem in runs])

    def summary(self, way: str, width: int, others: Sequence[str] = ()) -> dict[str, Any]:
        """Return the figures of a way, and its gain over others of the same width, paired by problem."""
        right = self.per_problem(way, width, "right")
        found: dict[str, Any] = {"way": way, "width": width, "accuracy": interval(right)}
        for name in ("passes", "tokens"):
            found[name] = float(self.per_problem(way, width, name).mean())
        for name in ("right_samples", "any_right"):
            if name in self.runs[way, width][0][0]:
                found[name] = interval(self.per_problem(way, width, name))
        for other in others:
            found[f"gain over {other}"] = interval(right - self.per_problem(other, width, "right"))
        return found


def compared_with(way: str) -> list[str]:
    """Return the ways that a way is compared with."""
    others = {
        "vote until consensus": ["vote"],
        "search top log_prob until consensus": ["search top log_prob"],
        "search systematic log_prob + vote": ["vote"],
    }
    if way in others:
        return others[way]
    if not way.startswith("search"):
        return []
    return ["best_of check"] if way.endswith(("check", "look_ahead")) else ["best_of log_prob", "vote"]


def submit_all(solver: Solver, index: int, problem: Problem, sizes: Any) -> list[tuple[str, int, int, RequestHandle]]:
    """Submit a problem once for each way, width and repeat; return these, the problem's index, and the request."""
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    requests = [("greedy", 1, index, solver.submit(problem, "shared_prefix", do_sample=False))]
    for repeat in range(sizes.repeats):
        seed = (sizes.seed * 1000 + repeat) * 100_000 + index
        for width in sizes.widths:
            for way, settings in ways(width).items():
                handle = solver.submit(problem, seed=seed, **settings, **sampling)
                requests.append((way, width, index, handle))
    return requests


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    problems = countdown.all_problems(sizes.numbers, sizes.highest)[: sizes.problems]
    measured = Measured(len(problems))
    with Engine(model, tokenizer, max_rows=sizes.rows, max_kv_bytes=KV_BYTES) as engine:
        solver = Solver(engine, tokenizer)
        for first in progress_bar(range(0, len(problems), TOGETHER), what="Solving", unit="groups of problems"):
            requests = []
            for index in range(first, min(first + TOGETHER, len(problems))):
                requests += submit_all(solver, index, problems[index], sizes)
            for way, width, index, handle in requests:
                measured.add(way, width, index, solver.figures(problems[index], handle))
    summaries = [measured.summary("greedy", 1)]
    for width in sizes.widths:
        summaries += [measured.summary(way, width, compared_with(way)) for way in ways(width)]
    show(summaries)
    training: Mapping[str, Any] = model.training_figures
    example = {
        "prompt": countdown.write_prompt(problems[0]),
        "greedy": measured.runs["greedy", 1][0][0]["text"],
    }
    return {"training": training, "example": example, "results": summaries}


def show(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per way and width."""
    for found in summaries:
        accuracy = found["accuracy"]
        between = f"{accuracy['low']:.1%} to {accuracy['high']:.1%}"
        gains = [
            f"{name.removeprefix('gain ')} {gain['mean']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})"
            for name, gain in found.items()
            if re.match("gain", name)
        ]
        print(
            f"{found['width']:3} {found['way']:34} {accuracy['mean']:6.1%} ({between}), {found['passes']:.1f} passes, "
            f"{found['tokens']:.0f} tokens  {'; '.join(gains)}"
        )
