"""Requests over a few system prompts: the engine, `generate` one after another, continuous batching of transformers.

- `throughput`: all requests at once. `single`: one request, beside `generate`.
- `load`: requests arrive at random times (a Poisson process), whether or not earlier ones are answered. Times count
  from the planned arrival, so that a late client does not hide a slow engine. The rates are fractions of the measured
  capacity, up to 20 % more than it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hf_parallel.engine import Engine, QueueFullError
from hf_parallel.progress import progress_bar

from .gpu_parts.models import kv_bytes_per_token
from .measure import generate_batch, long_prompt, timed

SIZES: dict[str, Any] = {"requests": 16, "systems": 4, "prompt": 512, "new_tokens": 64, "rounds": 1, "singles": 5}
SIZES |= {"seconds": 60.0, "least": 40, "lengths": (16, 64), "max_waiting": 8, "burst": 64, "checked": 8}
SIZES |= {"rates": (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2)}
"""Of `load`: seconds of a rate (0: no load) and its least number of requests; least and most new tokens of a request;
requests that wait, that measure the capacity, and that are compared with `generate`; fractions of the capacity."""
QUICK: dict[str, Any] = {"requests": 4, "systems": 2, "prompt": 24, "new_tokens": 6, "singles": 2}
QUICK |= {"seconds": 1.0, "least": 4, "lengths": (4, 8), "max_waiting": 2, "burst": 8, "checked": 2}
QUICK |= {"rates": (0.5, 1.2)}
TARGETS = (
    ("one_after_another_by_engine", "at least", 4.0, "all requests: one after another relative to the engine"),
    ("continuous_batching_by_engine", "at least", 2.0, "all requests: continuous batching relative to the engine"),
    ("single_by_generate", "at most", 1.05, "a single request: the engine relative to generate"),
    ("overhead_ms", "at most", 0.3, "overhead of the engine per decode step of all rows, in ms"),
    ("failed", "at most", 0, "load: requests that failed"),
    ("wrong", "at most", 0, "load: wrong answers"),
    ("kv_by_budget", "at most", 1, "load: highest KV bytes by budget"),
    ("rejected", "at least", 1, "load: rejections beyond the capacity"),
)
FIXED_LENGTH: dict[str, Any] = {"eos_token_id": -1, "pad_token_id": 0}
KV_TOKENS = 8192
"""Tokens that the budget of the engine holds under load."""
SAMPLED = 0.25
"""Fraction of the requests of the load that are sampled; the others are greedy."""

Prompt = Callable[[int], list[int]]
"""Returns the prompt of the request with this number."""


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    systems = [system_prompt(tokenizer, number, sizes.prompt) for number in range(sizes.systems + sizes.singles)]

    def prompt(number: int) -> list[int]:
        return systems[number % sizes.systems] + question(tokenizer, number)

    alone(model, prompt(0)[:8], 2)  # loads what the first call loads
    throughput = measure_throughput(model, tokenizer, [prompt(number) for number in range(sizes.requests)], sizes)
    own = [system + question(tokenizer, number) for number, system in enumerate(systems[sizes.systems :])]
    single = measure_singles(model, tokenizer, own, sizes.new_tokens)
    seconds, cpu = throughput["seconds"], single["cpu_seconds"]
    ratios = {f"{name}_by_engine": median_ratio(times, seconds["engine"]) for name, times in seconds.items()}
    ratios["single_by_generate"] = median_ratio(single["engine"], single["generate"])
    ratios["single_cpu_by_generate"] = median_ratio(cpu["engine"], cpu["generate"])
    ratios["overhead_ms"] = 1e3 * throughput["decode_step"]["overhead"]
    found = {"throughput": throughput, "single": single, "ratios": ratios}
    if sizes.seconds:
        found["load"] = load = measure_load(model, tokenizer, prompt, sizes)
        ratios["failed"] = sum(sum(entry["errors"].values()) for entry in load["rates"])
        ratios |= {"wrong": load["check"]["wrong"], "rejected": load["rates"][-1]["rejected"]}
        ratios["kv_by_budget"] = max(entry["highest_kv_bytes"] for entry in load["rates"]) / load["kv_budget_bytes"]
    return found


def system_prompt(tokenizer: Any, number: int, length: int) -> list[int]:
    """Return a system prompt of `length` tokens; different numbers give different first words."""
    text = f"{number + 1}. You are the porter of hotel {number + 1}, and know its guest book.\n"
    return (tokenizer(text)["input_ids"] + long_prompt(tokenizer, length)[0].tolist())[:length]


def question(tokenizer: Any, number: int) -> list[int]:
    """Return a question, different for each number."""
    return tokenizer(f"\nQuestion {number + 1}: what did guest {number + 1} like? Answer:")["input_ids"]


def alone(model: Any, prompt: list[int], tokens: int, **settings: Any) -> list[int]:
    """Return the new tokens of plain `generate`."""
    ids = torch.tensor([prompt], device=model.device)
    settings = {"do_sample": False, "generation_mode": None, **FIXED_LENGTH, **settings}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **settings)[
        0, len(prompt) :
    ].tolist()


def in_engine(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Submit prompts at once, and return their new tokens."""
    settings = {"max_new_tokens": tokens, "do_sample": False, **FIXED_LENGTH}
    outputs = [handle.result() for handle in [engine.submit(prompt, **settings) for prompt in prompts]]
    return [output.sequences[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def measure_throughput(model: Any, tokenizer: Any, prompts: list[list[int]], sizes: Any) -> dict[str, Any]:
    """Return seconds and tokens per second of all requests by way, and whether their tokens are the same."""
    seconds: dict[str, list[float]] = defaultdict(list)
    found: dict[str, Any] = {}
    for _ in progress_bar(range(sizes.rounds), what=f"{len(prompts)} requests", unit="rounds"):
        with Engine(model, tokenizer, max_rows=len(prompts)) as engine:
            took, ours = timed(partial(in_engine, engine, prompts, sizes.new_tokens))
        stats = engine.stats
        step = {"step": stats.step_seconds / stats.steps, "overhead": stats.overhead_seconds / stats.steps}
        seconds["engine"].append(took)
        took, expected = timed(lambda: [alone(model, prompt, sizes.new_tokens) for prompt in prompts])
        seconds["one_after_another"].append(took)
        found |= {"stats": stats.to_dict(), "decode_step": step, "same_tokens": ours == expected}
        try:
            took, done = timed(partial(generate_batch, model, prompts, sizes.new_tokens, do_sample=False))
        except Exception as error:  # an error is reported as a result
            found["error_of_continuous_batching"] = f"{type(error).__name__}: {error}"
            continue
        seconds["continuous_batching"].append(took)
        by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in done}
        found["same_tokens_of_continuous_batching"] = [by_prompt[tuple(prompt)] for prompt in prompts] == expected
    total = len(prompts) * sizes.new_tokens
    rates = {name: total / statistics.median(times) for name, times in seconds.items()}
    return {"seconds": dict(seconds), "tokens_per_second": rates} | found


def measure_singles(model: Any, tokenizer: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return the seconds of single requests. Each has a prompt of its own, as the engine keeps prompts."""
    found: dict[str, Any] = {"engine": [], "generate": [], "same_tokens": True}
    found["cpu_seconds"] = {"engine": [], "generate": []}  # which other work on the machine does not change
    for number, prompt in enumerate(progress_bar(prompts, what="Single requests", unit="requests")):
        answers = {}
        with Engine(model, tokenizer) as engine:
            ways: dict[str, Callable[[], Any]] = {
                "engine": partial(lambda opened, asked: in_engine(opened, [asked], tokens)[0], engine, prompt),
                "generate": partial(alone, model, prompt, tokens),
            }
            for way in sorted(ways, reverse=bool(number % 2)):
                cpu = time.process_time()
                took, answers[way] = timed(ways[way])
                found["cpu_seconds"][way].append(time.process_time() - cpu)
                found[way].append(took)
        found["same_tokens"] &= answers["engine"] == answers["generate"]
    return found


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of pairs."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=False))


@dataclass
class Request:
    """A request of the load, when it arrives, and its outcome; times in seconds after the planned arrival."""

    number: int
    at: float
    prompt: list[int]
    new_tokens: int
    sampled: bool
    status: str = "ok"  # or "rejected", or an error
    late: float = 0.0  # when it was sent
    times: list[float] = field(default_factory=list)  # of each token
    output: list[int] = field(default_factory=list)
    kv_bytes: int = 0  # most bytes of the engine when it read a token

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `generate`."""
        if self.sampled:
            return {"do_sample": True, "seed": self.number, "generation_mode": "shared_prefix", **FIXED_LENGTH}
        return {"do_sample": False, **FIXED_LENGTH}

    async def send(self, engine: Engine, limit: float, began: float) -> Request:
        """Submit it at its time, and read its tokens. After `limit` seconds, it fails."""
        await asyncio.sleep(max(0.0, began + self.at - time.perf_counter()))
        self.late = time.perf_counter() - began - self.at
        try:
            await asyncio.wait_for(self._read(engine, began), limit - self.at)
        except QueueFullError:
            self.status = "rejected"
        except Exception as error:  # an error is reported as a result
            self.status = f"{type(error).__name__}: {error}"
        return self

    async def _read(self, engine: Engine, began: float) -> None:
        async for token in engine.submit(self.prompt, max_new_tokens=self.new_tokens, **self.settings):
            self.times.append(time.perf_counter() - began - self.at)
            self.output.append(int(token))
            self.kv_bytes = max(self.kv_bytes, engine.stats.kv_bytes)


def arrivals(prompt: Prompt, rate: float, seconds: float, new_tokens: Sequence[int], seed: int) -> list[Request]:
    """Draw the arrivals of `seconds` at `rate` requests per second, each with a prompt of its own."""
    found: list[Request] = []
    drawn, at = random.Random(seed), 0.0
    while (at := at + drawn.expovariate(rate)) < seconds:
        number = len(found)
        found.append(Request(number, at, prompt(number), drawn.randint(*new_tokens), drawn.random() < SAMPLED))
    return found


async def offer(engine: Engine, requests: Sequence[Request], limit: float) -> list[Request]:
    """Send requests at their times, and return them with their outcomes."""
    began = time.perf_counter()
    return await asyncio.gather(*(request.send(engine, limit, began) for request in requests))


def measure_load(model: Any, tokenizer: Any, prompt: Prompt, sizes: Any) -> dict[str, Any]:
    """Return capacity, the figures of each rate, and a comparison of some answers with `generate`."""
    budget = KV_TOKENS * kv_bytes_per_token(model)
    load: dict[str, Any] = {"kv_budget_bytes": budget, "rates": []}
    given: list[Request] = []
    burst = arrivals(prompt, 1.0, 10.0 * sizes.burst, sizes.lengths, 0)[: sizes.burst]
    print("capacity")
    with Engine(model, tokenizer, budget, max_rows=sizes.requests) as engine:
        took, _ = timed(partial(asyncio.run, offer(engine, [replace(one, at=0.0) for one in burst], 600.0)))
        load["requests_per_second"] = len(burst) / took
    with Engine(model, tokenizer, budget, max_rows=sizes.requests, max_waiting=sizes.max_waiting) as engine:
        for number, fraction in enumerate(sizes.rates):
            rate = fraction * load["requests_per_second"]
            print(f"{rate:.2f} requests per second, {fraction:.0%} of the capacity")
            excess = rate - rate / fraction
            filling = 2 * (sizes.requests + sizes.max_waiting) / excess if excess > 0 else 0.0  # seconds of the queue
            seconds = max(sizes.seconds, sizes.least / rate, filling)
            first = (number + 1) * 100_000
            requests = arrivals(lambda one: prompt(first + one), rate, seconds, sizes.lengths, number)  # noqa: B023
            given += requests
            asyncio.run(offer(engine, requests, 3 * seconds + 60))
            load["rates"].append({"of_capacity": fraction, "rate": rate} | summary(requests))
        load["stats"] = engine.stats.to_dict()
    ok = [request for request in given if request.status == "ok"]
    chosen = ok[:: max(1, len(ok) // sizes.checked)][: sizes.checked]
    wrong = sum(one.output != alone(model, one.prompt, one.new_tokens, **one.settings) for one in chosen)
    return load | {"check": {"checked": len(chosen), "wrong": wrong}}


def summary(requests: Sequence[Request]) -> dict[str, Any]:
    """Return percentiles of the times, and counts."""
    ok = [request for request in requests if request.status == "ok" and request.times]
    gaps = [b - a for request in ok for a, b in zip(request.times, request.times[1:], strict=False)]
    span = max((request.at + request.times[-1] for request in ok), default=0.0)
    statuses = Counter(request.status for request in requests)
    return {
        "offered": len(requests),
        "rejected": statuses.pop("rejected", 0),
        "answered": statuses.pop("ok", 0),
        "errors": dict(statuses),
        "requests_per_second": len(ok) / span if span else 0.0,
        "tokens_per_second": sum(len(request.times) for request in ok) / span if span else 0.0,
        "first_token": percentiles([request.times[0] for request in ok]),
        "between_tokens": percentiles(gaps),
        "highest_kv_bytes": max(request.kv_bytes for request in requests),
        "sent_late": percentiles([request.late for request in requests]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in seconds; nothing of no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}
