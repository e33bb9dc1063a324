"""Prefetcher: computes the sampling distributions of later replays while the model decodes (Hive, section 6.3).

Hive samples the tokens of the next replay in advance. Here their random noise depends on the seed of that replay, which
is not known yet. So only the distributions, and the uncertainty that replay policies need, are computed in advance.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue

import torch

from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.generation.decoding.replay.distributions import DistributionCache
from hf_parallel.generation.decoding.replay.policies import uncertainty_at

MAX_NODES = 4096  # maximum number that one call precomputes
_logger = logging.getLogger(__name__)


class Prefetcher:
    """Background thread that visits trie nodes: those below the prompts, level by level, and those with new logits."""

    def __init__(self, distributions: DistributionCache, uncertainty: bool) -> None:
        self._distributions = distributions
        self._uncertainty = uncertainty
        self._queue: SimpleQueue[tuple[TrieNode, int] | None] = SimpleQueue()  # nodes, tokens of a row at each
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_parallel prefetch", daemon=True)

    @contextmanager
    def open(self, roots: dict[TrieNode, int]) -> Iterator[None]:
        """Set the nodes at which `start` begins, with the length of their rows; join the thread on exit."""
        for root in roots.items():
            self._queue.put(root)
        try:
            yield
        finally:
            self._closed.set()
            self._queue.put(None)
            if self._thread.ident is not None:
                self._thread.join()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if (self._distributions.enabled or self._uncertainty) and self._thread.ident is None:
            self._thread.start()

    def add(self, node: TrieNode, length: int) -> None:
        """Add a node whose logits are new, with the number of tokens of its row."""
        if self._thread.is_alive():
            self._queue.put((node, length))

    def _run(self) -> None:
        device = self._distributions.sampler.table.device
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        visited: set[TrieNode] = set()
        try:
            with torch.no_grad(), stream:
                while len(visited) < MAX_NODES:
                    entry = self._queue.get()
                    if entry is None or self._closed.is_set():
                        break
                    node, length = entry
                    logits = node.logits  # read once, as another thread may evict the node
                    if node in visited or logits is None:
                        continue
                    visited.add(node)
                    self._distributions.precompute(node, logits, length)
                    if self._uncertainty:
                        uncertainty_at(node, logits)
                    for child in self._distributions.cache.children(node):
                        self._queue.put((child, length + 1))
        except RuntimeError as error:
            _logger.warning("prefetch has stopped; replays compute their distributions themselves: %s", error)
