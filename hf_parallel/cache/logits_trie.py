"""Trie of cached logits in host memory, with eviction of the least recently used leaves (Hive, section 6).

A node is a token sequence from the first token of a prompt on; it holds the logits that the model computed after that
sequence. Hive keeps only the sequence that was decoded last; the trie keeps all of them, so that a replay can follow
any continuation that was sampled before.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch

from hf_parallel.cache.cached_logits import CachedDistribution, CachedLogits

NODE_BYTES = 400
"""Bytes of a node besides its logits: the object and its entry in the parent's dictionary."""


@dataclass(eq=False)
class TrieNode:
    """A token sequence: that of the parent, followed by `token`."""

    token: int
    parent_node: InitVar[TrieNode | None]
    children: dict[int, TrieNode] = field(default_factory=dict)
    logits: CachedLogits | None = None  # of the next token
    distribution: CachedDistribution | None = None  # of the next token, under the latest sampling settings
    uncertainty: float | None = None  # score of a replay policy
    sampled_with: str | None = None  # `CachedDistribution.settings` under which `token` was sampled last
    last_used: int = 0
    pins: int = 0  # number of cursors; a pinned node is not evicted
    alive: bool = True  # False once evicted or cleared
    queued: bool = False  # whether in the eviction queue

    def __post_init__(self, parent_node: TrieNode | None) -> None:
        # A weak reference: a trie without reference cycles is freed at once.
        self._parent = None if parent_node is None else weakref.ref(parent_node)

    @property
    def parent(self) -> TrieNode | None:
        """The node of the sequence without its last token; None for a root."""
        return None if self._parent is None else self._parent()

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return NODE_BYTES + sum(kept.num_bytes for kept in (self.logits, self.distribution) if kept is not None)

    def delete(self) -> None:
        """Free the tensors, even if the node is referenced elsewhere; a pinned node keeps them."""
        self.alive = False
        if not self.pins:
            self.logits = self.distribution = None


class LogitsTrie:
    """Nodes by model and token sequence, within a budget. Base of `LogitsCache`, which has the same parameters."""

    def __init__(self, max_bytes: int, top_k: int | None) -> None:
        self.max_bytes, self.top_k = max_bytes, top_k
        self.hits = self.misses = 0
        self.num_bytes = 0
        self._roots: dict[str, TrieNode] = {}
        self._clock = 0
        self._lock = threading.RLock()
        self._queue: list[tuple[int, int, TrieNode]] = []  # heap of leaves by last use; entries may be outdated

    def __len__(self) -> int:
        return sum(node.logits is not None for _, node in self.nodes())

    @contextmanager
    def cursors(self) -> Iterator[Cursors]:
        """Open a set of cursors. Their nodes are pinned until the context exits."""
        cursors = Cursors(self)
        try:
            yield cursors
        finally:
            cursors.close()

    def nodes(self) -> Iterator[tuple[str, TrieNode]]:
        """Yield every node with the key of its model, parents first."""
        with self._lock:
            stack = list(self._roots.items())
            while stack:
                key, node = stack.pop()
                yield key, node
                stack.extend((key, child) for child in node.children.values())

    def children(self, node: TrieNode) -> list[TrieNode]:
        """Return a copy of the list of a node's children."""
        with self._lock:
            return list(node.children.values())

    def last_child(self, node: TrieNode) -> TrieNode | None:
        """Return the most recently used child, or None if there is none."""
        return max(self.children(node), key=lambda child: child.last_used, default=None)

    def clear(self) -> None:
        """Delete all nodes; the counters stay. Running calls continue, but store nothing on deleted nodes."""
        with self._lock:
            for _, node in list(self.nodes()):
                node.delete()
            self._roots, self._queue, self.num_bytes = {}, [], 0

    def keep_last_path(self) -> None:
        """Delete all but the most recently used sequence of each model: the content of Hive's own cache.

        Running calls continue, but store nothing on deleted nodes.
        """
        with self._lock:
            nodes = list(self.nodes())
            last: dict[str, TrieNode] = {}
            for key, node in nodes:
                if key not in last or node.last_used > last[key].last_used:
                    last[key] = node
            kept = set(last.values())
            for _, node in reversed(nodes):  # children before their parents
                node.children = {token: child for token, child in node.children.items() if child in kept}
                if node.children:
                    kept.add(node)
                elif node not in kept:
                    self.num_bytes -= node.num_bytes
                    node.delete()
            self._queue = [entry for entry in self._queue if entry[2].alive]
            heapq.heapify(self._queue)
            for node in last.values():
                self._enqueue(node)

    def store_distribution(self, node: TrieNode, distribution: CachedDistribution) -> bool:
        """Replace a node's distribution; returns False if it does not fit the budget or the node has no logits."""
        with self._lock:
            more = distribution.num_bytes - (0 if node.distribution is None else node.distribution.num_bytes)
            self._evict(more)
            if not node.alive or node.logits is None or self.num_bytes + more > self.max_bytes:
                return False
            node.distribution = distribution
            self.num_bytes += more
            return True

    def _store(self, node: TrieNode, logits: torch.Tensor) -> bool:
        """Store a node's logits if they fit the budget; returns whether the node has logits."""
        if node.logits is not None:
            return True
        if not node.alive:
            return False
        cached = CachedLogits.from_logits(logits, self.top_k)
        self._evict(cached.num_bytes)
        if self.num_bytes + cached.num_bytes > self.max_bytes:
            return False
        node.logits = cached
        self.num_bytes += cached.num_bytes
        return True

    def _root(self, key: str) -> TrieNode:
        if key not in self._roots:
            self._roots[key] = TrieNode(-1, None)
        return self._roots[key]

    def _child(self, node: TrieNode, token: int) -> TrieNode:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = TrieNode(token, node, alive=node.alive)
            self.num_bytes += child.num_bytes if child.alive else 0
        return child

    def _enqueue(self, node: TrieNode) -> None:
        """Add a node to the eviction queue if it is an unpinned leaf."""
        if node.alive and not (node.queued or node.children or node.pins) and node.parent is not None:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, id(node), node))

    def _evict(self, num_bytes: int) -> None:
        """Evict the least recently used leaves until `num_bytes` more fit the budget, as far as possible."""
        while self.num_bytes + num_bytes > self.max_bytes and self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if not node.alive or node.children or node.pins:
                continue  # queued again when that changes
            if node.last_used != used:
                self._enqueue(node)
                continue
            parent = node.parent
            assert parent is not None, "roots are never queued"
            self.num_bytes -= node.num_bytes
            node.delete()
            del parent.children[node.token]
            self._enqueue(parent)
            if parent.parent is None and not (parent.children or parent.pins):
                self._roots = {key: root for key, root in self._roots.items() if root is not parent}


class Cursors:
    """Positions of rows in a trie: each row's cursor is on the node of the tokens that the row has."""

    def __init__(self, trie: LogitsTrie) -> None:
        self._trie = trie
        self._nodes: dict[Any, TrieNode] = {}

    def start(self, row: Any, key: str, tokens: Sequence[int]) -> None:
        """Place a row's cursor on the node of `tokens`, the prompt; `key` identifies the model."""
        with self._trie._lock:
            node = self._trie._root(key)
            for token in tokens:
                node = self._trie._child(node, int(token))
            self._place(row, node)

    def advance(self, row: Any, token: int) -> None:
        """Move a row's cursor to the child with `token`, which is created if missing."""
        with self._trie._lock:
            self._place(row, self._trie._child(self._nodes[row], int(token)))

    def lookup(self, row: Any, count: int = 0, log_tail: float = np.inf) -> bool:
        """Return whether the row's node has sufficient logits (see `CachedLogits.covers`), and count a hit or miss."""
        with self._trie._lock:
            logits = self._nodes[row].logits
            found = logits is not None and logits.covers(count, log_tail)
            self._trie.hits += found
            self._trie.misses += not found
            return found

    def has_logits(self, row: Any) -> bool:
        """Return whether the row's node has logits."""
        return self._nodes[row].logits is not None

    def store(self, row: Any, logits: torch.Tensor) -> bool:
        """Store logits `[vocabulary]` at the row's node; returns False if they do not fit the budget."""
        with self._trie._lock:
            return self._trie._store(self._nodes[row], logits)

    def node(self, row: Any) -> TrieNode:
        """Return the row's node."""
        return self._nodes[row]

    def close(self) -> None:
        """Unpin all nodes."""
        with self._trie._lock:
            for row in list(self._nodes):
                self._unpin(row)
            self._trie._evict(0)

    def _place(self, row: Any, node: TrieNode) -> None:
        node.pins += 1  # before the old node is unpinned, which may be the same one
        if row in self._nodes:
            self._unpin(row)
        self._nodes[row] = node
        self._trie._clock += 1
        node.last_used = self._trie._clock
        self._trie._evict(0)

    def _unpin(self, row: Any) -> None:
        node = self._nodes.pop(row)
        node.pins -= 1
        self._trie._enqueue(node)
