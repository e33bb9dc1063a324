"""Measures the engine: `python -m benchmarks.engine --help`.

By default: requests over a few system prompts through the engine, one after another with `generate`, and by the
continuous batching of transformers; a single request against `generate`; and where the time of a decode step goes.
`--load` and `--soak` offer requests at random times instead (`benchmarks.engine_load`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_parallel.cache import BlockCache, Pool
from hf_parallel.cli.measure import long_prompt
from hf_parallel.engine import Engine
from hf_parallel.engine import engine as engine_module
from hf_parallel.engine.passes import PendingPass
from hf_parallel.engine.request import Request
from hf_parallel.engine.scheduler import Scheduler
from hf_parallel.engine.storage import KVStorage
from hf_parallel.generation import sampling
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.sampling import Sampler
from hf_parallel.models.cached_model import CachedModel

from .__main__ import about, add_model_options, finish, new_path, set_up
from .engine_load import LoadBenchmark, SoakBenchmark, load_targets, show_load
from .engine_servers import check_url
from .rounds import compare, targets_table
from .shared_prefix import PAGE, page_settings

TARGETS = (
    ("one_after_another_by_engine", "at least", 4.0, "all requests: one after another relative to the engine"),
    ("continuous_batching_by_engine", "at least", 2.0, "all requests: continuous batching relative to the engine"),
    ("single_by_generate", "at most", 1.05, "a single request: the engine relative to generate"),
    ("overhead_ms", "at most", 0.3, "overhead of the engine per decode step of all rows, in ms"),
)
"""Ratio, direction, limit, and description of the ratio."""

PARTS: tuple[tuple[str, Any, str], ...] = (
    ("cpu.model", CachedModel, "logits"),
    ("cpu.requests", Engine, "_call"),
    ("cpu.append_token", DecodeLoop, "append"),
    ("cpu.stream_token", Request, "_on_sample"),
    ("cpu.sample", engine_module, "sample_together"),
    ("cpu.process_logits", sampling, "process"),
    ("cpu.finish_sampling", sampling._Batch, "_finish"),
    ("cpu.sample_alone", Sampler, "sample"),
    ("cpu.join_passes", engine_module, "join_passes"),
    ("cpu.plan", BlockCache, "prepare_run"),
    ("cpu.expand_views", PendingPass, "expand_views"),
    ("cpu.grow_storage", Pool, "_grow"),
    ("cpu.commit", KVStorage, "commit"),
    ("cpu.record", engine_module, "record_passes"),
    ("cpu.choose_batch", Scheduler, "next_batch"),
)
"""Parts of a step whose time is measured: name, owner of the function, function. Later ones may lie within others."""

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
        log("parts of a step")
        report["step"] = self._step(model, tokenizer, prompts)
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
        steps: list[dict[str, float]] = []
        for number in range(self.rounds):
            of = f"round {number + 1} of {self.rounds}"
            log(f"{self.requests} requests, engine, {of}")
            with step_parts(()) as measured, Engine(model, tokenizer, max_rows=self.requests) as engine:
                took, ours = self._in_engine(engine, prompts)
                found["stats"] = engine.stats.to_dict()
            steps += measured
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
        return {"seconds": dict(seconds), "tokens_per_second": rates, "decode_step": self._medians(steps)} | found

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

    def _step(self, model: Any, tokenizer: Any, prompts: list[list[int]]) -> dict[str, Any]:
        """Return the parts of a decode step of all rows."""
        with step_parts(PARTS) as steps, Engine(model, tokenizer, max_rows=self.requests) as engine:
            self._in_engine(engine, prompts)
        return self._medians(steps)

    def _medians(self, steps: list[dict[str, float]]) -> dict[str, float]:
        """Return the median seconds of decode steps of all rows, by part."""
        decode = [step for step in steps if step["rows"] == step["running"] == self.requests]
        if not decode:
            raise RuntimeError(f"no step had {self.requests} rows, but {[step['rows'] for step in steps]}")
        names = dict.fromkeys(name for step in decode for name in step if name not in ("rows", "running"))
        return {"steps": len(decode)} | {
            name: statistics.median(step.get(name, 0.0) for step in decode) for name in names
        }


@contextmanager
def step_parts(parts: Sequence[tuple[str, Any, str]]) -> Iterator[list[dict[str, float]]]:
    """Measure the steps of engines: a list of seconds by part, and of the numbers of rows that got a token.

    `overhead` is what `EngineStats` counts: the step without the model's forward pass, which includes joining and
    planning, and without the code of the requests and their sampling. `parts` are CPU seconds of the engine's thread,
    which other work on the machine does not change. Measuring them takes time of its own.
    """
    steps: list[dict[str, float]] = []
    current: dict[str, float] = defaultdict(float)

    def measured(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                current[name] += time.thread_time() - began

        return call

    def measured_step(engine: Any) -> None:
        current.clear()
        tokens = sum(request.num_tokens for request in engine._scheduler.running)
        model, requests = engine._work.model_seconds, engine._work.request_seconds
        began, cpu = time.perf_counter(), time.thread_time()
        plain_step(engine)
        current["step"], current["cpu.step"] = time.perf_counter() - began, time.thread_time() - cpu
        current["model_and_plan"] = engine._work.model_seconds - model
        current["requests"] = engine._work.request_seconds - requests
        current["overhead"] = current["step"] - current["model_and_plan"] - current["requests"]
        if parts:
            inner = sum(current[name] for name in ("cpu.model", "cpu.requests", "cpu.sample"))
            current["cpu.overhead_and_plan"] = current["cpu.step"] - inner
            current["cpu.overhead"] = (
                current["cpu.overhead_and_plan"] - current["cpu.plan"] - current["cpu.join_passes"]
            )
        current["running"] = len(engine._scheduler.running)
        current["rows"] = sum(request.num_tokens for request in engine._scheduler.running) - tokens
        steps.append(dict(current))

    plain_step = Engine._step
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Engine, "_step", measured_step))
        for name, owner, attribute in parts:
            function = vars(owner).get(attribute)
            if function is None:
                function = getattr(owner, attribute)  # inherited
            wrapped = measured(name, getattr(function, "__func__", function))
            is_static = isinstance(function, staticmethod)
            stack.enter_context(mock.patch.object(owner, attribute, staticmethod(wrapped) if is_static else wrapped))
        yield steps


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
        table = Table("part", "ms", title="decode step of all rows", title_justify="left")
        for name, seconds in report["step"].items():
            if name != "steps":
                table.add_row(name, f"{1e3 * seconds:.3f}")
        console.print(table)
    if "load" in report or "soak" in report:
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

    if not options.load and options.soak is None:
        benchmark = EngineBenchmark(prompt=options.prompt, rounds=options.rounds)
        if options.quick:
            benchmark = EngineBenchmark(4, 2, options.prompt, new_tokens=6, singles=2)
        report |= benchmark.run(model, tokenizer, console.print)
        kind = "engine"
    load = LoadBenchmark(seconds=options.seconds)
    if options.quick:
        load = LoadBenchmark(1.0, (4, 8), max_rows=4, max_waiting=2, burst=8, rates=(0.5, 1.2), checked=2, least=4)
    if options.load:
        report["load"] = load.run(model, tokenizer, prompt, console.print, options.url, options.pid)
        kind = "engine-load"
    if options.soak is not None:
        soak = SoakBenchmark(options.soak, load=replace(load, checked=50))
        report["soak"] = soak.run(model, tokenizer, prompt, console.print, options.url, options.pid)
        kind = "engine-soak"
    report["targets"] = compare(report.get("ratios", {}), TARGETS) + load_targets(report)
    finish(console, report, options.output or new_path(kind, options.quick), show)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds of all requests (1)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of a system prompt (512)")
    parser.add_argument("--load", action="store_true", help="offer requests at random times, at increasing rates")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="time of each rate of --load, at least (60)"
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="offer requests at 80 %% of the capacity")
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
