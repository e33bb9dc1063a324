"""Requests over a few system prompts: the engine, `generate` one after another, continuous batching of transformers.

Also a single request against `generate`. `benchmarks.engine_load` offers requests at random times instead.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from hf_parallel.engine import Engine

from .continuous_batching import generate_batch
from .measure import long_prompt
from .report import run_benchmark
from .rounds import timed

TARGETS = (
    ("one_after_another_by_engine", "at least", 4.0, "all requests: one after another relative to the engine"),
    ("continuous_batching_by_engine", "at least", 2.0, "all requests: continuous batching relative to the engine"),
    ("single_by_generate", "at most", 1.05, "a single request: the engine relative to generate"),
    ("overhead_ms", "at most", 0.3, "overhead of the engine per decode step of all rows, in ms"),
)
"""Ratio, direction, limit, and description of the ratio."""

FIXED_LENGTH: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
"""Settings under which every request generates its maximum number of tokens."""


def system_prompt(tokenizer: Any, number: int, length: int) -> list[int]:
    """Return a system prompt of `length` tokens; different numbers give different first words."""
    text = f"{number + 1}. You are the porter of hotel {number + 1}, and know its guest book.\n"
    return (tokenizer(text)["input_ids"] + long_prompt(tokenizer, length)[0].tolist())[:length]


def question(tokenizer: Any, number: int) -> list[int]:
    """Return a question, different for each number."""
    return tokenizer(f"\nQuestion {number + 1}: what did guest {number + 1} like? Answer:")["input_ids"]


@dataclass(frozen=True)
class EngineBenchmark:
    """Settings and run.

    Parameters
    ----------
    requests, systems, prompt, new_tokens : int
        Requests, the system prompts that they share, tokens of a system prompt, and new tokens of a request.
    rounds, singles : int
        Rounds of all requests, and of a single one.
    """

    requests: int = 16
    systems: int = 4
    prompt: int = 512
    new_tokens: int = 64
    rounds: int = 1
    singles: int = 5

    def run(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Return the entries of the report."""
        prompts = [
            system_prompt(tokenizer, number % self.systems, self.prompt) + question(tokenizer, number)
            for number in range(self.requests)
        ]
        self._alone(model, prompts[0][:8], 2)  # loads what the first call loads
        throughput = self._throughput(model, tokenizer, prompts)
        single = self._singles(model, tokenizer)
        engine = throughput["seconds"]["engine"]
        ratios = {
            f"{name}_by_engine": median_ratio(times, engine)
            for name, times in throughput["seconds"].items()
            if name != "engine" and len(times) == len(engine)
        }
        ratios["single_by_generate"] = median_ratio(single["engine"], single["generate"])
        ratios["single_cpu_by_generate"] = median_ratio(*(single["cpu_seconds"][way] for way in ("engine", "generate")))
        ratios["overhead_ms"] = 1e3 * throughput["decode_step"]["overhead"]
        return {"settings": asdict(self), "throughput": throughput, "single": single, "ratios": ratios}

    def _alone(self, model: Any, prompt: list[int], tokens: int | None = None) -> list[int]:
        """Return the new tokens of plain `generate`."""
        ids = torch.tensor([prompt], device=model.device)
        given = {"attention_mask": torch.ones_like(ids), "generation_mode": None, **FIXED_LENGTH}
        return model.generate(ids, max_new_tokens=tokens or self.new_tokens, **given)[0, len(prompt) :].tolist()

    def _in_engine(self, engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Submit prompts at once, and return their new tokens."""
        handles = [engine.submit(prompt, max_new_tokens=self.new_tokens, **FIXED_LENGTH) for prompt in prompts]
        outputs = [handle.result() for handle in handles]
        pairs = zip(outputs, prompts, strict=True)
        return [output.sequences[0, len(prompt) :].tolist() for output, prompt in pairs]

    def _throughput(self, model: Any, tokenizer: Any, prompts: list[list[int]]) -> dict[str, Any]:
        seconds: dict[str, list[float]] = defaultdict(list)
        found: dict[str, Any] = {}
        for number in range(self.rounds):
            of = f"round {number + 1} of {self.rounds}"
            print(f"{self.requests} requests, engine, {of}")
            with Engine(model, tokenizer, max_rows=self.requests) as engine:
                took, ours = timed(partial(self._in_engine, engine, prompts))
            stats = engine.stats
            found["stats"] = stats.to_dict()
            found["decode_step"] = {
                "step": stats.step_seconds / stats.steps,
                "overhead": stats.overhead_seconds / stats.steps,
            }
            seconds["engine"].append(took)
            print(f"{self.requests} requests, one after another, {of}")
            took, expected = timed(lambda: [self._alone(model, prompt) for prompt in prompts])
            seconds["one_after_another"].append(took)
            found["same_tokens"] = ours == expected
            print(f"{self.requests} requests, continuous batching, {of}")
            try:
                took, done = timed(partial(generate_batch, model, prompts, self.new_tokens, do_sample=False))
            except Exception as error:  # an error is reported as a result
                found["error_of_continuous_batching"] = f"{type(error).__name__}: {error}"
            else:
                seconds["continuous_batching"].append(took)
                by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in done}
                same = [by_prompt[tuple(prompt)] for prompt in prompts] == expected
                found["same_tokens_of_continuous_batching"] = same
        total = self.requests * self.new_tokens
        rates = {name: total / statistics.median(times) for name, times in seconds.items()}
        return {"seconds": dict(seconds), "tokens_per_second": rates} | found

    def _singles(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Return the seconds of single requests. Each has a prompt of its own, as the engine keeps prompts."""
        found: dict[str, Any] = {"engine": [], "generate": [], "same_tokens": True}
        found["cpu_seconds"] = {"engine": [], "generate": []}  # which other work on the machine does not change
        for number in range(self.singles):
            print(f"a single request, {number + 1} of {self.singles}")
            prompt = system_prompt(tokenizer, self.systems + number, self.prompt) + question(tokenizer, number)
            answers = {}
            for way in ("engine", "generate") if number % 2 else ("generate", "engine"):
                with ExitStack() as stack:
                    run = partial(self._alone, model, prompt)
                    if way == "engine":
                        engine = stack.enter_context(Engine(model, tokenizer))
                        run = partial(lambda opened, asked: self._in_engine(opened, [asked])[0], engine, prompt)
                    cpu = time.process_time()
                    took, answers[way] = timed(run)
                    found["cpu_seconds"][way].append(time.process_time() - cpu)
                found[way].append(took)
            found["same_tokens"] &= answers["engine"] == answers["generate"]
        return found


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of pairs."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        benchmark = EngineBenchmark(prompt=options.prompt, rounds=options.rounds)
        if options.quick:
            benchmark = EngineBenchmark(4, 2, 24, new_tokens=6, singles=2)
        return benchmark.run(model, tokenizer)

    return run_benchmark("engine", __doc__, measure, TARGETS, prompt=512, rounds=1)


if __name__ == "__main__":
    sys.exit(main())
