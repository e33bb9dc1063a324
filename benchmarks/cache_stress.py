"""Stress test of a LogitsCache with several threads: `python -m benchmarks.resample --stress`."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from hf_parallel.cache.logits import LogitsCache

THREADS = 8


@dataclass(eq=False)
class Stress:
    """Threads that read and write one cache and check the logits that they read.

    Parameters
    ----------
    seconds : float
    max_bytes : int
        Capacity of the cache. If it is too small for all states, states are evicted continuously.

    Attributes
    ----------
    cache : LogitsCache
    reads, writes, wrong, most_bytes : int
        Number of successful reads, of written states, of reads with logits of another state, and peak size of the
        cache.
    lost : int
        States missing right after they were written or, if the capacity suffices for all, at the end.
    """

    seconds: float
    max_bytes: int
    reads: int = 0
    writes: int = 0
    wrong: int = 0
    lost: int = 0
    most_bytes: int = 0

    def __post_init__(self) -> None:
        self.cache = LogitsCache(self.max_bytes)
        self._written: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """Run the threads; return an entry of the report."""
        end = time.perf_counter() + self.seconds
        threads = [threading.Thread(target=self._work, args=(number, end)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.most_bytes < self.max_bytes / 2:
            self.lost += self._missing()
        names = ("max_bytes", "most_bytes", "reads", "writes", "wrong", "lost")
        figures = {name: getattr(self, name) for name in names}
        counts = {"states": len(self._written), "operations": self.reads + self.writes}
        return {"threads": THREADS, "seconds": self.seconds} | counts | figures

    def _work(self, number: int, end: float) -> None:
        choose = random.Random(number)
        reads = writes = wrong = lost = most = 0
        written = set()
        while time.perf_counter() < end:
            with self.cache.cursors() as cursors:
                tokens: tuple[int, ...] = (1, 2)
                cursors.start(number, "model", tokens)
                for token in choose.choices(range(4), k=8):
                    true = logits_of(tokens)
                    if not cursors.has_logits(number):
                        writes += cursors.store(number, true)
                    if cursors.has_logits(number):
                        logits = cursors.node(number).logits
                        reads += 1
                        lost += logits is None
                        wrong += logits is not None and not torch.equal(logits.to_dense(), true)
                        written.add(tokens)
                    cursors.advance(number, token)
                    tokens = (*tokens, token)
                    most = max(most, self.cache.num_bytes)
        with self._lock:
            self.reads, self.writes = self.reads + reads, self.writes + writes
            self.wrong, self.lost = self.wrong + wrong, self.lost + lost
            self.most_bytes = max(self.most_bytes, most)
            self._written |= written

    def _missing(self) -> int:
        """Count the written states that the cache does not hold."""
        missing = 0
        with self.cache.cursors() as cursors:
            for tokens in self._written:
                cursors.start(0, "model", tokens)
                missing += not cursors.has_logits(0)
        return missing


def logits_of(tokens: tuple[int, ...]) -> torch.Tensor:
    """Return logits, `float32 [64]`, unique to these tokens."""
    return torch.full((64,), float(hash(tokens) % (1 << 24)))
