"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine import Engine, RequestHandle
from hf_parallel.engine.server.logits_cache import collect

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAUGES = {
    "running": "Requests that run",
    "waiting": "Requests in the queue, preempted ones included",
    "kv_bytes": "Bytes of keys and values held, cached prefixes included",
    "leases": "Responses whose prefixes stay cached for forks",
    "lease_bytes": "Bytes of keys, values and states that these prefixes have",
    "reserved_bytes": "Bytes of storage reserved for keys and values",
}
_COUNTERS = {
    "evicted_tokens": "Cached tokens that were evicted",
    "preemptions": "Preemptions of requests",
    "reused_tokens": "Prompt tokens whose keys and values were cached",
    "prefilled_tokens": "Prompt tokens that were computed",
    "decoded_tokens": "Generated tokens",
    "replayed_tokens": "Generated tokens that were drawn from cached logits",
    "steps": "Forward passes",
    "finished": "Requests that finished",
    "failed": "Requests that failed",
    "cancelled": "Requests that were canceled",
}


class Metrics:
    """Collects the metrics of one server."""

    def __init__(
        self, engine: Engine, max_kv_bytes: int | None = None, logits_cache: LogitsCache | None = None
    ) -> None:
        self.engine = engine
        self.logits_cache = logits_cache
        self.max_kv_bytes = max_kv_bytes
        self._registry = CollectorRegistry()
        self._registry.register(self)
        names = ["path", "status"]
        self._responses = Counter("hf_parallel_responses", "Responses by status", names, registry=self._registry)
        self._histograms = {
            name: Histogram(f"hf_parallel_{name}_seconds", words, buckets=_SECONDS, registry=self._registry)
            for name, words in (
                ("queue", "Time in the queue"),
                ("time_to_first_token", "Time from submission to the first token"),
                ("time_per_token", "Time between two steps of a request after its first token, on average"),
                ("request", "Time from submission to the end"),
            )
        }

    def add_response(self, path: str, status: int) -> None:
        """Count a response by the path of its route."""
        self._responses.labels(path, str(status)).inc()

    def add_request(self, handle: RequestHandle, num_rows: int) -> None:
        """Record the times of a request that has ended."""
        times = handle.times
        if times.started is not None:
            self._histograms["queue"].observe(times.started - times.submitted)
        if times.ended is None:
            return
        if times.first_token is not None:
            self._histograms["time_to_first_token"].observe(times.first_token - times.submitted)
            steps = handle.stats.decoded_tokens / max(num_rows, 1) - 1
            if steps > 0:
                self._histograms["time_per_token"].observe((times.ended - times.first_token) / steps)
        self._histograms["request"].observe(times.ended - times.submitted)

    def text(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine; the registry calls it at each scrape."""
        stats = self.engine.stats.to_dict()
        for name, words in _GAUGES.items():
            yield GaugeMetricFamily(f"hf_parallel_{name}", words, stats[name])
        for name, words in _COUNTERS.items():
            yield CounterMetricFamily(f"hf_parallel_{name}", words, stats[name])
        words = "Fraction of prompt tokens whose keys and values were cached"
        prompt_tokens = stats["reused_tokens"] + stats["prefilled_tokens"]
        rate = stats["reused_tokens"] / max(prompt_tokens, 1)
        yield GaugeMetricFamily("hf_parallel_hit_rate", words, rate)
        if self.logits_cache is not None:
            yield from collect(self.logits_cache)
        if self.max_kv_bytes is not None:
            yield GaugeMetricFamily("hf_parallel_max_kv_bytes", "Budget of keys and values", self.max_kv_bytes)
