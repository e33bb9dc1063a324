"""Servers for `benchmarks.engine_load`: an engine in this process, or one on this machine that is reached by HTTP."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2 as httpx
import psutil  # type: ignore[import-untyped]

from hf_parallel.engine import Engine, QueueFullError

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Arrival:
    """A request, and when it arrives, in seconds."""

    number: int
    at: float
    prompt: list[int]
    new_tokens: int
    sampled: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `generate`."""
        how = {"do_sample": True, "seed": self.number} if self.sampled else {"do_sample": False}
        return {"max_new_tokens": self.new_tokens, "eos_token_id": -1, "pad_token_id": 0} | how


@dataclass
class Answer:
    """Outcome of a request: `ok`, `rejected`, or an error. Times in seconds after its planned arrival."""

    arrival: Arrival
    status: str = "ok"
    late: float = 0.0  # when it was sent
    times: list[float] = field(default_factory=list)  # of each token
    output: Any = None  # new tokens, or text
    retry_after: bool = False


class Server(Protocol):
    """Answers requests."""

    async def send(self, arrival: Arrival, now: Callable[[], float], answer: Answer) -> None:
        """Send a request and fill in its answer; raise if it fails."""

    def usage(self) -> dict[str, float]:
        """Return bytes of keys and values in use by requests (`used`) and in total (`kv`), and of the process."""

    def max_kv_bytes(self) -> int | None:
        """Return the budget of keys and values, if there is one."""


class InProcess:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._process = engine, psutil.Process()

    async def send(self, arrival: Arrival, now: Callable[[], float], answer: Answer) -> None:
        """See `Server.send`."""
        given = arrival.settings | ({"generation_mode": "shared_prefix"} if arrival.sampled else {})
        try:
            handle = self.engine.submit(arrival.prompt, **given)
        except QueueFullError:
            answer.status, answer.retry_after = "rejected", True
            return
        answer.output = []
        async for token in handle:
            answer.times.append(now())
            answer.output.append(int(token))

    def usage(self) -> dict[str, float]:
        """See `Server.usage`."""
        storage = self.engine._storage
        own = sum(request.own_tokens for request in list(self.engine._scheduler.running))
        return {
            "kv": self.engine.stats.kv_bytes,
            "used": (own + storage.used_tokens()) * storage.arena.bytes_per_token,
            "rss": self._process.memory_info().rss,
        }

    def max_kv_bytes(self) -> int | None:
        """See `Server.max_kv_bytes`."""
        return self.engine._storage.max_bytes


class OverHTTP:
    """A server with the completions endpoint of OpenAI's API."""

    def __init__(self, url: str, tokenizer: Any, client: httpx.AsyncClient, pid: int | None = None) -> None:
        self.url, self.tokenizer, self.client = url.rstrip("/"), tokenizer, client
        self._process = psutil.Process(pid) if pid else None
        self._model = httpx.get(f"{self.url}/v1/models", trust_env=False).json()["data"][0]["id"]

    async def send(self, arrival: Arrival, now: Callable[[], float], answer: Answer) -> None:
        """See `Server.send`."""
        body = {
            "model": self._model,
            "prompt": self.tokenizer.decode(arrival.prompt),
            "max_tokens": arrival.new_tokens,
            "min_new_tokens": arrival.new_tokens,
            "temperature": 1.0 if arrival.sampled else 0.0,
            "seed": arrival.number,
            "stream": True,
        }
        async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code == 429:
                answer.status, answer.retry_after = "rejected", "retry-after" in response.headers
                return
            response.raise_for_status()
            answer.output = ""
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(chunk["error"])
                    if any(choice.get("text") for choice in chunk["choices"]):
                        answer.times.append(now())
                        answer.output += chunk["choices"][0]["text"]

    def usage(self) -> dict[str, float]:
        """See `Server.usage`; without `used`, which the server does not tell."""
        found = {} if self._process is None else {"rss": float(self._process.memory_info().rss)}
        kv = self._metric("hf_parallel_kv_bytes")
        return found if kv is None else found | {"kv": kv}

    def max_kv_bytes(self) -> int | None:
        """See `Server.max_kv_bytes`."""
        budget = self._metric("hf_parallel_max_kv_bytes")
        return None if budget is None else int(budget)

    def _metric(self, name: str) -> float | None:
        metrics = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.search(rf"^{name} (\S+)", metrics, re.MULTILINE)
        return None if found is None else float(found[1])


def check_url(url: str) -> str:
    """Return the URL; raise an error if it names another machine."""
    if urlsplit(url).scheme != "http" or urlsplit(url).hostname not in LOCAL:
        raise ArgumentTypeError(f"must begin with http:// and name this machine ({', '.join(LOCAL)}), got {url!r}")
    return url
