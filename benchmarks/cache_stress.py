"""Threads that read and write one LogitsCache (`python -m benchmarks.resample --stress`)."""

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
    """Threads that read and write one cache, and check every answer.

    Parameters
    ----------
    seconds : float
    max_bytes : int
        Of the cache: where it is too small for all states, some are dropped all the time.

    Attributes
    ----------
    cache : LogitsCache
    reads, writes, wrong, most_bytes : int
        Reads that were answered, states that were written, answers that were not those of the state, and the most that
        the cache has held.
    lost : int
        States that were written and not there, at once or, where there was room for all, in the end.
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
        """Run the threads; returns what goes into the JSON."""
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
                    if not cursors.known(number):
                        writes += cursors.remember(number, true)
                    if cursors.known(number):
                        found = cursors.logits(number)
                        reads += 1
                        lost += found is None
                        wrong += found is not None and not torch.equal(found, true)
                        written.add(tokens)
                    cursors.follow(number, token)
                    tokens = (*tokens, token)
                    most = max(most, self.cache.num_bytes)
        with self._lock:
            self.reads, self.writes = self.reads + reads, self.writes + writes
            self.wrong, self.lost = self.wrong + wrong, self.lost + lost
            self.most_bytes = max(self.most_bytes, most)
            self._written |= written

    def _missing(self) -> int:
        """States that were written and are not there."""
        missing = 0
        with self.cache.cursors() as cursors:
            for tokens in self._written:
                cursors.start(0, "model", tokens)
                missing += not cursors.known(0)
        return missing


def logits_of(tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits `float32 [64]` that no other tokens have."""
    return torch.full((64,), float(hash(tokens) % (1 << 24)))
