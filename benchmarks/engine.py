"""Measures the engine: `python -m benchmarks.engine --help`.

By default: requests over a few system prompts through the engine, one after another with `generate`, and by the
continuous batching of transformers; and a single request against `generate`. `--load` offers requests at random times
instead (`benchmarks.engine_load`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_parallel.cli.measure import long_prompt
from hf_parallel.engine import Engine

from .engine_load import LoadBenchmark, load_targets, show_load
from .engine_servers import check_url
from .report import about, add_model_options, finish, new_path, set_up
from .rounds import compare, targets_table
from .shared_prefix import PAGE, page_settings

TARGETS = (
    ("one_after_another_by_engine", "at least", 4.0, "all requests: one after another relative to the engine"),
    ("continuous_batching_by_engine", "at least", 2.0, "all requests: continuous batching relative to the engine"),
    ("single_by_generate", "at most", 1.05, "a single request: the engine relative to generate"),
    ("overhead_ms", "at most", 0.3, "overhead of the engine per decode step of all rows, in ms"),
)
"""Ratio, direction, limit, and description of the ratio."""

Log = Callable[[str], None]
FIXED_LENGTH: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
"""Settings under which every request generates its maximum number of tokens."""


def system_prompt(tokenizer: Any, number: int, length: int) -> list[int]:
    """Return a system prompt of `length` tokens; those of different numbers differ from the first words on."""
    begin = tokenizer(f"{number + 1}. You are the porter of hotel {number + 1}, and know its guest book.\n")[
        "input_ids"
    ]
    return (begin + long_prompt(tokenizer, length)[0].tolist())[:length]


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
    continuous_batching : bool
        Whether to measure `generate_batch` of transformers.
    """

    requests: int = 16
    systems: int = 4
    prompt: int = 512
    new_tokens: int = 64
    rounds: int = 1
    singles: int = 5
    continuous_batching: bool = True

    def run(self, model: Any, tokenizer: Any, log: Log) -> dict[str, Any]:
        """Return the entries of the report."""
        prompts = [
            system_prompt(tokenizer, number % self.systems, self.prompt) + question(tokenizer, number)
            for number in range(self.requests)
        ]
        self._alone(model, prompts[0][:8], 2)  # loads what the first call loads
        report = {"settings": asdict(self), "throughput": self._throughput(model, tokenizer, prompts, log)}
        report["single"] = self._singles(model, tokenizer, log)
        report["ratios"] = self._ratios(report)
        return report

    @staticmethod
    def _ratios(report: dict[str, Any]) -> dict[str, float]:
        seconds = report["throughput"]["seconds"]
        ratios = {
            f"{name}_by_engine": statistics.median(a / b for a, b in zip(times, seconds["engine"], strict=True))
            for name, times in seconds.items()
            if name != "engine" and len(times) == len(seconds["engine"])
        }
        single = report["single"]
        pairs = zip(single["engine"], single["generate"], strict=True)
        ratios["single_by_generate"] = statistics.median(a / b for a, b in pairs)
        pairs = zip(single["cpu_seconds"]["engine"], single["cpu_seconds"]["generate"], strict=True)
        ratios["single_cpu_by_generate"] = statistics.median(a / b for a, b in pairs)
        ratios["overhead_ms"] = 1e3 * report["throughput"]["decode_step"]["overhead"]
        return ratios

    def _alone(self, model: Any, prompt: list[int], tokens: int | None = None) -> list[int]:
        """Return the new tokens of plain `generate`."""
        ids = torch.tensor([prompt], device=model.device)
        given = {"attention_mask": torch.ones_like(ids), "generation_mode": None, **FIXED_LENGTH}
        return model.generate(ids, max_new_tokens=tokens or self.new_tokens, **given)[0, len(prompt) :].tolist()

    def _in_engine(self, engine: Engine, prompts: Sequence[list[int]]) -> tuple[float, list[list[int]]]:
        """Submit prompts at once; return the seconds until the last one is answered, and the new tokens."""
        began = time.perf_counter()
        handles = [engine.submit(prompt, max_new_tokens=self.new_tokens, **FIXED_LENGTH) for prompt in prompts]
        outputs = [handle.result() for handle in handles]
        seconds = time.perf_counter() - began
        pairs = zip(outputs, prompts, strict=True)
        return seconds, [output.sequences[0, len(prompt) :].tolist() for output, prompt in pairs]

    def _throughput(self, model: Any, tokenizer: Any, prompts: list[list[int]], log: Log) -> dict[str, Any]:
        seconds: dict[str, list[float]] = defaultdict(list)
        found: dict[str, Any] = {}
        for number in range(self.rounds):
            of = f"round {number + 1} of {self.rounds}"
            log(f"{self.requests} requests, engine, {of}")
            with Engine(model, tokenizer, max_rows=self.requests) as engine:
                took, ours = self._in_engine(engine, prompts)
            stats = engine.stats
            found["stats"] = stats.to_dict()
            found["decode_step"] = {
                "step": stats.step_seconds / stats.steps,
                "overhead": stats.overhead_seconds / stats.steps,
            }
            seconds["engine"].append(took)
            log(f"{self.requests} requests, one after another, {of}")
            took, expected = timed(lambda: [self._alone(model, prompt) for prompt in prompts])
            seconds["one_after_another"].append(took)
            found["same_tokens"] = ours == expected
            if self.continuous_batching:
                log(f"{self.requests} requests, continuous batching, {of}")
                try:
                    took, others = timed(lambda: self._generate_batch(model, prompts))
                except Exception as error:  # an error is reported as a result
                    found["error_of_continuous_batching"] = f"{type(error).__name__}: {error}"
                else:
                    seconds["continuous_batching"].append(took)
                    found["same_tokens_of_continuous_batching"] = others == expected
        total = self.requests * self.new_tokens
        rates = {name: total / statistics.median(times) for name, times in seconds.items()}
        return {"seconds": dict(seconds), "tokens_per_second": rates} | found

    def _generate_batch(self, model: Any, prompts: list[list[int]]) -> list[list[int]]:
        """Return the new tokens of continuous batching, which shares the pages of equal prefixes."""
        pages = sum(-(-(len(prompt) + self.new_tokens) // PAGE) + 1 for prompt in prompts)
        batching = ContinuousBatchingConfig(**page_settings(pages, self.prompt))
        if model.device.type == "cpu":
            batching.use_cuda_graph, batching.use_async_batching = False, False
        config = GenerationConfig(max_new_tokens=self.new_tokens, **FIXED_LENGTH)
        done = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
        answers = list(done.values())
        errors = [answer.error for answer in answers if answer.error]
        if errors or len(answers) != len(prompts):
            raise RuntimeError(errors[0] if errors else f"{len(answers)} of {len(prompts)} requests came back")
        by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    def _singles(self, model: Any, tokenizer: Any, log: Log) -> dict[str, Any]:
        """Return the seconds of single requests. Each has a prompt of its own, as the engine keeps prompts."""
        found: dict[str, Any] = {"engine": [], "generate": [], "same_tokens": True}
        found["cpu_seconds"] = {"engine": [], "generate": []}  # which other work on the machine does not change
        for number in range(self.singles):
            log(f"a single request, {number + 1} of {self.singles}")
            prompt = system_prompt(tokenizer, self.systems + number, self.prompt) + question(tokenizer, number)
            answers = {}
            for way in ("engine", "generate") if number % 2 else ("generate", "engine"):
                with ExitStack() as stack:
                    engine = stack.enter_context(Engine(model, tokenizer)) if way == "engine" else None
                    cpu = time.process_time()
                    if engine is None:
                        took, answers[way] = timed(partial(self._alone, model, prompt))
                    else:
                        took, (answers[way],) = self._in_engine(engine, [prompt])
                    found["cpu_seconds"][way].append(time.process_time() - cpu)
                found[way].append(took)
            found["same_tokens"] &= answers["engine"] == answers["generate"]
        return found


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    if "throughput" in report:
        throughput = report["throughput"]
        table = Table("", "s", "tokens/s", title="all requests", title_justify="left")
        for name, times in throughput["seconds"].items():
            table.add_row(name, f"{statistics.median(times):.2f}", f"{throughput['tokens_per_second'][name]:.1f}")
        console.print(table)
        for name in ("same_tokens", "same_tokens_of_continuous_batching", "error_of_continuous_batching"):
            if name in throughput:
                console.print(f"{name}: {throughput[name]}")
        step, overhead = (1e3 * throughput["decode_step"][name] for name in ("step", "overhead"))
        console.print(f"a step takes {step:.1f} ms, the engine {overhead:.2f} ms of it")
    if "load" in report:
        show_load(console, report)
    console.print(targets_table(report["targets"]))
    if report["quick"]:
        console.print("(--quick: the figures are meaningless)")


def main() -> int:
    """Run the benchmark; return the exit status."""
    options = _parse()
    console = Console(highlight=False)
    model, tokenizer = set_up(options)
    report = about(model, options) | {"quick": options.quick}
    systems = [system_prompt(tokenizer, number, options.prompt) for number in range(EngineBenchmark.systems)]

    def prompt(number: int) -> list[int]:
        return systems[number % len(systems)] + question(tokenizer, number)

    if options.load:
        load = LoadBenchmark(seconds=options.seconds)
        if options.quick:
            load = LoadBenchmark(1.0, (4, 8), max_rows=4, max_waiting=2, burst=8, rates=(0.5, 1.2), checked=2, least=4)
        report["load"] = load.run(model, tokenizer, prompt, console.print, options.url, options.pid)
    else:
        benchmark = EngineBenchmark(prompt=options.prompt, rounds=options.rounds)
        if options.quick:
            benchmark = EngineBenchmark(4, 2, options.prompt, new_tokens=6, singles=2)
        report |= benchmark.run(model, tokenizer, console.print)
    kind = "engine-load" if options.load else "engine"
    report["targets"] = compare(report.get("ratios", {}), TARGETS) + load_targets(report)
    finish(console, report, options.output or new_path(kind, options.quick), show)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds of all requests (1)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of a system prompt (512)")
    parser.add_argument("--load", action="store_true", help="offer requests at random times, at increasing rates")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="time of each rate of --load, at least (60)"
    )
    parser.add_argument(
        "--url", type=check_url, help="of a server on this machine (default: an engine in this process)"
    )
    parser.add_argument("--pid", type=int, metavar="N", help="process of the server, whose memory is measured")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    options = parser.parse_args()
    options.prompt = options.prompt or (24 if options.quick else EngineBenchmark.prompt)
    return options


if __name__ == "__main__":
    sys.exit(main())
