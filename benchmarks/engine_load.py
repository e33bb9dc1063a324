"""Open-loop load on an engine: requests arrive at random times, whether or not earlier ones are answered.

Arrivals are a Poisson process drawn from a seed. Times count from the planned arrival, so that a late client does not
hide a slow engine. The rates are fractions of the measured capacity, up to 20 % more than it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hf_parallel.engine import Engine, QueueFullError

from .engine import EngineBenchmark, question, system_prompt
from .report import compare, run_benchmark

KV_TOKENS = 8192
"""Tokens that the budget of the engine holds."""
SAMPLED = 0.25
"""Fraction of the requests that are sampled; the others are greedy."""
RETRY_SECONDS = 0.05
TARGETS = (
    ("failed", "at most", 0, "requests that failed"),
    ("wrong", "at most", 0, "wrong answers"),
    ("kv_by_budget", "at most", 1, "highest KV bytes by budget"),
    ("rejected", "at least", 1, "rejections beyond the capacity"),
)
"""Figure, direction, limit, and description of the figure."""

Prompt = Callable[[int], list[int]]
"""Returns the prompt of the request with this number."""


@dataclass
class Request:
    """A request, when it arrives, and its outcome; times in seconds after the planned arrival."""

    number: int
    at: float
    prompt: list[int]
    new_tokens: int
    sampled: bool
    status: str = "ok"  # or "rejected", or an error
    late: float = 0.0  # when it was sent
    times: list[float] = field(default_factory=list)  # of each token
    output: list[int] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `generate`."""
        how: dict[str, Any] = {"do_sample": False}
        if self.sampled:
            how = {"do_sample": True, "seed": self.number, "generation_mode": "shared_prefix"}
        return {"max_new_tokens": self.new_tokens, "eos_token_id": -1, "pad_token_id": 0} | how

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
        async for token in engine.submit(self.prompt, **self.settings):
            self.times.append(time.perf_counter() - began - self.at)
            self.output.append(int(token))


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
        "sent_late": percentiles([request.late for request in requests]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in seconds; nothing of no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


@dataclass(frozen=True)
class LoadBenchmark:
    """Settings and run.

    Parameters
    ----------
    seconds, least : float, int
        Time of each rate, and the expected number of its requests, at least.
    new_tokens : tuple of int
        Least and most new tokens of a request.
    max_rows, max_waiting : int
        Of the engine.
    burst : int
        Requests that measure the capacity: they are submitted `max_rows` at a time.
    rates : tuple of float
        Relative to the capacity.
    checked : int
        Requests whose tokens are compared with `generate`.
    """

    seconds: float = 60.0
    new_tokens: tuple[int, int] = (16, 64)
    max_rows: int = 16
    max_waiting: int = 8
    burst: int = 64
    rates: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2)
    checked: int = 8
    seed: int = 0
    least: int = 40

    def run(self, model: Any, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
        """Return the entries of the report."""
        config = model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.dtype.itemsize
        budget, rows = KV_TOKENS * token, self.max_rows
        load: dict[str, Any] = {"settings": asdict(self), "kv_budget_bytes": budget, "rates": []}
        given: list[Request] = []
        with Engine(model, tokenizer, budget, max_rows=rows, max_waiting=self.max_waiting) as engine:
            print("capacity")
            load["requests_per_second"] = asyncio.run(self._capacity(engine, prompt))
            for number, fraction in enumerate(self.rates):
                entry, requests = self._rate(engine, prompt, number, fraction * load["requests_per_second"])
                load["rates"].append({"of_capacity": fraction} | entry)
                given += requests
            load["stats"] = engine.stats.to_dict()
        load["check"] = check(model, given, self.checked)
        return {"load": load, "targets": compare(figures(load), TARGETS)}

    def _rate(self, engine: Engine, prompt: Prompt, number: int, rate: float) -> tuple[dict[str, Any], list[Request]]:
        """Offer one rate; beyond the capacity for twice as long as the queue takes to fill."""
        print(f"{rate:.2f} requests per second, {self.rates[number]:.0%} of the capacity")
        excess = rate - rate / self.rates[number]
        filling = 2 * (self.max_rows + self.max_waiting) / excess if excess > 0 else 0.0
        seconds = max(self.seconds, self.least / rate, filling)
        first = (number + 1) * 100_000
        requests = arrivals(lambda one: prompt(first + one), rate, seconds, self.new_tokens, self.seed + number)
        done, seen = threading.Event(), [0]

        def watch() -> None:
            while not done.wait(0.5):
                seen.append(engine.stats.kv_bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            asyncio.run(offer(engine, requests, limit=3 * seconds + 60))
        finally:
            done.set()
            watcher.join()
        return {"rate": rate} | summary(requests) | {"highest_kv_bytes": max(seen)}, requests

    async def _capacity(self, engine: Engine, prompt: Prompt) -> float:
        """Return the requests per second with `max_rows` in flight at any time."""
        slots = asyncio.Semaphore(self.max_rows)
        requests = arrivals(prompt, 1.0, 10.0 * self.burst, self.new_tokens, self.seed)[: self.burst]

        async def send(request: Request) -> Request:
            async with slots:
                while True:
                    (answer,) = await offer(engine, [replace(request, at=0.0, times=[], output=[])], limit=600.0)
                    if answer.status != "rejected":
                        return answer
                    await asyncio.sleep(RETRY_SECONDS)

        began = time.perf_counter()
        failed = [one.status for one in await asyncio.gather(*map(send, requests)) if one.status != "ok"]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
        return len(requests) / (time.perf_counter() - began)


def check(model: Any, requests: Sequence[Request], count: int) -> dict[str, int]:
    """Compare answers, evenly spaced, with `generate`."""
    given = [request for request in requests if request.status == "ok"]
    chosen = given[:: max(1, len(given) // count)][:count]
    wrong = 0
    for request in chosen:
        ids = torch.tensor([request.prompt], device=model.device)
        settings = {"generation_mode": None, "attention_mask": torch.ones_like(ids)} | request.settings
        wrong += request.output != model.generate(ids, **settings)[0, ids.shape[1] :].tolist()
    return {"checked": len(chosen), "wrong": wrong}


def figures(load: dict[str, Any]) -> dict[str, float]:
    """Return the figures of `TARGETS`."""
    return {
        "failed": sum(sum(entry["errors"].values()) for entry in load["rates"]),
        "wrong": load["check"]["wrong"],
        "rejected": load["rates"][-1]["rejected"],
        "kv_by_budget": max(entry["highest_kv_bytes"] for entry in load["rates"]) / load["kv_budget_bytes"],
    }


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        load, length = LoadBenchmark(options.seconds), options.prompt
        if options.quick:
            load = LoadBenchmark(1.0, (4, 8), max_rows=4, max_waiting=2, burst=8, rates=(0.5, 1.2), checked=2, least=4)
            length = 24
        systems = [system_prompt(tokenizer, number, length) for number in range(EngineBenchmark.systems)]
        return load.run(model, tokenizer, lambda n: systems[n % len(systems)] + question(tokenizer, n))

    return run_benchmark("engine_load", __doc__, measure, prompt=512, seconds=60.0)


if __name__ == "__main__":
    sys.exit(main())
