"""Open-loop load on an engine: requests arrive at random times, whether or not earlier ones are answered.

Arrivals are a Poisson process drawn from a seed. Times count from the planned arrival, so that a late client does not
hide a slow engine. The engine is one in this process, or a server on this machine (`--url`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx2 as httpx
import torch
from rich.console import Console
from rich.table import Table

from hf_parallel.engine import Engine

from .engine_servers import Answer, Arrival, InProcess, OverHTTP, Server
from .rounds import compare

KV_TOKENS = 8192
"""Tokens that the budget of the engine in this process holds."""
SAMPLED = 0.25
"""Fraction of the requests that are sampled; the others are greedy."""
RETRY_SECONDS = 0.05
LOAD_TARGETS = (
    ("failed", "at most", 0, "load: requests that failed"),
    ("wrong", "at most", 0, "load: wrong answers"),
    ("kv_by_budget", "at most", 1, "load: highest KV bytes by budget"),
    ("unannounced", "at most", 0, "load: rejections beyond the capacity without Retry-After"),
    ("rejected", "at least", 1, "load: rejections beyond the capacity"),
)
"""Figure, direction, limit, and description of the figure."""

Log = Callable[[str], None]
Prompt = Callable[[int], list[int]]
"""Returns the prompt of the request with this number."""


def arrivals(prompt: Prompt, rate: float, seconds: float, new_tokens: Sequence[int], seed: int) -> list[Arrival]:
    """Draw the arrivals of `seconds` at `rate` requests per second, each with a prompt of its own."""
    found: list[Arrival] = []
    drawn, at = random.Random(seed), 0.0
    while True:
        at += drawn.expovariate(rate)
        if at >= seconds:
            return found
        number = len(found)
        given = number, at, prompt(number), drawn.randint(*new_tokens), drawn.random() < SAMPLED
        found.append(Arrival(*given))


async def offer(server: Server, requests: Sequence[Arrival], limit: float) -> list[Answer]:
    """Send requests at their times, and return the answers; after `limit` seconds, those that are missing fail."""
    began = time.perf_counter()

    async def send(arrival: Arrival) -> Answer:
        def now() -> float:
            return time.perf_counter() - began - arrival.at

        answer = Answer(arrival)
        await asyncio.sleep(max(0.0, -now()))
        answer.late = now()
        try:
            await asyncio.wait_for(server.send(arrival, now, answer), limit - arrival.at)
        except Exception as error:  # an error is reported as a result
            answer.status = f"{type(error).__name__}: {error}"
        return answer

    return await asyncio.gather(*map(send, requests))


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return percentiles of the times, and counts."""
    ok = [answer for answer in answers if answer.status == "ok" and answer.times]
    gaps = [b - a for answer in ok for a, b in zip(answer.times, answer.times[1:], strict=False)]
    span = max((answer.arrival.at + answer.times[-1] for answer in ok), default=0.0)
    statuses = Counter(answer.status for answer in answers)
    rejected = statuses.pop("rejected", 0)
    return {
        "offered": len(answers),
        "answered": statuses.pop("ok", 0),
        "rejected": rejected,
        "rejected_with_retry_after": sum(answer.retry_after for answer in answers),
        "errors": dict(statuses),
        "requests_per_second": len(ok) / span if span else 0.0,
        "tokens_per_second": sum(len(answer.times) for answer in ok) / span if span else 0.0,
        "first_token": percentiles([answer.times[0] for answer in ok]),
        "between_tokens": percentiles(gaps),
        "sent_late": percentiles([answer.late for answer in answers]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in seconds; nothing of no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


class Watch:
    """Records the usage of a server, in a thread."""

    def __init__(self, server: Server, interval: float = 0.5) -> None:
        self._server, self._interval, self._done = server, interval, threading.Event()
        self.seen: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            self.seen.append(self._server.usage())

    def highest(self, name: str) -> float | None:
        """Return the highest value that was seen."""
        return max((usage[name] for usage in self.seen if name in usage), default=None)


@dataclass(frozen=True)
class LoadBenchmark:
    """Rates from a fraction of the capacity up to 20 % more than it.

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

    def run(self, model: Any, tokenizer: Any, prompt: Prompt, log: Log, url: str | None, pid: int | None) -> Any:
        """Return the entries of the report."""
        report: dict[str, Any] = {"settings": asdict(self), "url": url, "rates": []}

        async def measure() -> None:
            async with self.server(model, tokenizer, url, pid) as server:
                report["kv_budget_bytes"] = server.max_kv_bytes()
                report["requests_per_second"] = await self.capacity(server, prompt, log)
                report["stats_at_capacity"] = stats(server)
                for number, fraction in enumerate(self.rates):
                    rate = fraction * report["requests_per_second"]
                    log(f"{rate:.2f} requests per second, {fraction:.0%} of the capacity")
                    numbered = _offset(prompt, (number + 1) * 100_000)
                    seconds = max(self.seconds, self.least / rate, self._filling(rate, fraction))
                    requests = arrivals(numbered, rate, seconds, self.new_tokens, self.seed + number)
                    with Watch(server) as watch:
                        answers = await offer(server, requests, limit=3 * seconds + 60)
                    entry = {"rate": rate, "of_capacity": fraction} | summary(answers)
                    report["rates"].append(entry | {"highest_kv_bytes": watch.highest("kv")})
                    given.extend(answers)
                report["stats"] = stats(server)

        given: list[Answer] = []
        asyncio.run(measure())
        report["check"] = check(model, tokenizer, given, self.checked)
        return report

    def _filling(self, rate: float, fraction: float) -> float:
        """Return twice the seconds after which the queue is full beyond the capacity, else 0."""
        excess = rate - rate / fraction
        return 2 * (self.max_rows + self.max_waiting) / excess if excess > 0 else 0.0

    async def capacity(self, server: Server, prompt: Prompt, log: Log) -> float:
        """Return the requests per second with `max_rows` in flight at any time."""
        log("capacity")
        slots = asyncio.Semaphore(self.max_rows)
        requests = arrivals(prompt, 1.0, 10.0 * self.burst, self.new_tokens, self.seed)[: self.burst]

        async def send(arrival: Arrival) -> Answer:
            async with slots:
                while True:
                    (answer,) = await offer(server, [replace(arrival, at=0.0)], limit=600.0)
                    if answer.status != "rejected":
                        return answer
                    await asyncio.sleep(RETRY_SECONDS)

        began = time.perf_counter()
        answers = await asyncio.gather(*map(send, requests))
        failed = [answer.status for answer in answers if answer.status != "ok"]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
        return len(answers) / (time.perf_counter() - began)

    def server(
        self, model: Any, tokenizer: Any, url: str | None, pid: int | None = None
    ) -> AbstractAsyncContextManager[Server]:
        """Return the server at a URL, or an engine in this process."""
        return _over_http(url, tokenizer, pid) if url else self._in_process(model, tokenizer)

    @asynccontextmanager
    async def _in_process(self, model: Any, tokenizer: Any) -> AsyncIterator[Server]:
        config = model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.dtype.itemsize
        with Engine(
            model, tokenizer, KV_TOKENS * token, max_rows=self.max_rows, max_waiting=self.max_waiting
        ) as engine:
            yield InProcess(engine)


@asynccontextmanager
async def _over_http(url: str, tokenizer: Any, pid: int | None) -> AsyncIterator[Server]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        yield OverHTTP(url, tokenizer, client, pid)


def _offset(prompt: Prompt, first: int) -> Prompt:
    return lambda number: prompt(first + number)


def stats(server: Server) -> dict[str, Any] | None:
    """Return the statistics of an engine in this process."""
    return server.engine.stats.to_dict() if isinstance(server, InProcess) else None


def check(model: Any, tokenizer: Any, answers: Sequence[Answer], count: int) -> dict[str, int]:
    """Compare answers, evenly spaced, with `generate`. Of a server, which draws its own seeds, only greedy ones."""
    given = [a for a in answers if a.status == "ok" and not (a.arrival.sampled and isinstance(a.output, str))]
    wrong = 0
    chosen = given[:: max(1, len(given) // count)][:count]
    for answer in chosen:
        arrival, prompt = answer.arrival, answer.arrival.prompt
        settings = arrival.settings | {"generation_mode": "shared_prefix" if arrival.sampled else None}
        if isinstance(answer.output, str):
            prompt = tokenizer(tokenizer.decode(prompt))["input_ids"]
            settings |= {"eos_token_id": tokenizer.eos_token_id, "min_new_tokens": arrival.new_tokens}
        ids = torch.tensor([prompt], device=model.device)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
        if isinstance(answer.output, str):
            wrong += answer.output != tokenizer.decode(expected, skip_special_tokens=True)
        else:
            wrong += answer.output != expected
    return {"checked": len(chosen), "wrong": wrong}


def load_targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the results with their limits."""
    if "load" not in report:
        return []
    load = report["load"]
    rates, beyond = load["rates"], load["rates"][-1]
    found = {
        "failed": sum(sum(entry["errors"].values()) for entry in rates),
        "wrong": load["check"]["wrong"],
        "unannounced": beyond["rejected"] - beyond["rejected_with_retry_after"],
        "rejected": beyond["rejected"],
    }
    highest = [entry["highest_kv_bytes"] for entry in rates if entry["highest_kv_bytes"] is not None]
    if load["kv_budget_bytes"] and highest:
        found["kv_by_budget"] = max(highest) / load["kv_budget_bytes"]
    return compare(found, LOAD_TARGETS)


def show_load(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    rows = [(f"{entry['of_capacity']:.0%}", entry) for entry in report["load"]["rates"]]
    headings = ("first token, s", "", "between tokens, ms", "", "tokens/s", "rejected", "failed")
    table = Table("of capacity", "requests", *headings, title="open-loop load (p50, p99)", title_justify="left")
    for name, entry in rows:
        first, between = entry["first_token"], entry["between_tokens"]
        table.add_row(
            name,
            str(entry["offered"]),
            *(f"{first[p]:.2f}" if first else "" for p in ("p50", "p99")),
            *(f"{1e3 * between[p]:.0f}" if between else "" for p in ("p50", "p99")),
            f"{entry['tokens_per_second']:.1f}",
            str(entry["rejected"]),
            str(sum(entry["errors"].values())),
        )
    console.print(table)
