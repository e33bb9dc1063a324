"""Prefetcher: computes the sampling distributions of later replays while the model decodes (Hive, section 6.3).

Hive samples the tokens of the next replay in advance. Here their random noise depends on the seed of that replay, which
is not known yet. So only the distributions, and the uncertainty that replay policies need, are computed in advance.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import Empty, SimpleQueue

import torch

from hf_parallel.cache.logits_trie import CachedDistribution, TrieNode
from hf_parallel.generation.replay.distributions import DistributionCache
from hf_parallel.generation.replay.policies import uncertainty_at

MAX_NODES = 4096  # maximum number that one call precomputes
_logger = logging.getLogger(__name__)


class Prefetcher:
    """Background thread that visits the trie nodes below a call's prompts, in order of decreasing probability.

    The surprisal of a node is the negative logarithm of the product of its tokens' probabilities.
    """

    def __init__(self, distributions: DistributionCache, uncertainty: bool) -> None:
        self._distributions, self._uncertainty = distributions, uncertainty
        self._heap: list[tuple[float, int, TrieNode, int]] = []  # surprisal, order, node, length
        self._order = itertools.count()
        self._roots: dict[TrieNode, int] = {}
        self._visited: dict[TrieNode, tuple[float, int, CachedDistribution | None]] = {}  # surprisal, length
        self._queue: SimpleQueue[TrieNode | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_parallel prefetch", daemon=True)

    @contextmanager
    def open(self, roots: dict[TrieNode, int]) -> Iterator[None]:
        """Set the nodes at which `start` begins, with the length of their rows; join the thread on exit."""
        self._roots = roots
        for node in roots:
            self._push(node, 0.0, roots[node])
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

    def add(self, node: TrieNode) -> None:
        """Add a node whose logits are new."""
        if self._thread.is_alive():
            self._queue.put(node)

    def _run(self) -> None:
        device = self._distributions.sampler.table.device
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        try:
            with torch.no_grad(), stream:
                while not self._closed.is_set() and len(self._visited) < MAX_NODES:
                    self._dequeue()
                    if self._heap:
                        self._visit(*heapq.heappop(self._heap))
        except RuntimeError as error:
            _logger.warning("prefetch has stopped; replays compute their distributions themselves: %s", error)

    def _dequeue(self) -> None:
        """Process enqueued nodes; block if there is nothing to visit."""
        try:
            while (node := self._queue.get(block=not self._heap)) is not None:
                if node in self._roots:
                    self._push(node, 0.0, self._roots[node])
                elif node.parent in self._visited:  # otherwise pushed when the parent is visited
                    self._push_child(node.parent, node)
        except Empty:
            pass

    def _visit(self, surprisal: float, _: int, node: TrieNode, length: int) -> None:
        logits = node.logits  # read once, as another thread may evict the node
        if node in self._visited or logits is None:
            return
        distribution = self._distributions.precompute(node, logits, length) if self._distributions.enabled else None
        if self._uncertainty:
            uncertainty_at(node, logits)
        self._visited[node] = surprisal, length, distribution
        for child in self._distributions.cache.children(node):
            self._push_child(node, child)

    def _push_child(self, parent: TrieNode, child: TrieNode) -> None:
        surprisal, length, distribution = self._visited[parent]
        prob = 1.0 if distribution is None else distribution.prob(child.token)
        if prob:
            self._push(child, surprisal - math.log(prob), length + 1)

    def _push(self, node: TrieNode, surprisal: float, length: int) -> None:
        if node.logits is not None and node not in self._visited:
            heapq.heappush(self._heap, (surprisal, next(self._order), node, length))
