"""`LogitsCache`: trie of cached logits in host memory (Hive, section 6 and algorithm 1).

A node represents a token sequence that begins at the start of a prompt, and holds the logits that the model computed
for the next token. Hive keeps only the sequence that was decoded last; the trie keeps all of them, so that a replay can
follow any continuation that was sampled before. The least recently used leaves are evicted.
"""

from __future__ import annotations

import heapq
import hmac
import json
import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from hf_parallel.cache.images import SALT
from hf_parallel.cache.logits_trie import (
    NODE_BYTES,
    CachedDistribution,
    CachedLogits,
    TrieNode,
    check_arrays,
    digest_of,
    logits_at,
    read_keys,
    read_metadata,
    to_arrays,
)
from hf_parallel.files import atomic_file, read_file, warn_on_other_version

_FORMAT = "hf_parallel.LogitsCache/2"
MAX_FILE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 40
"""Size of the largest file that is read: the memory of this machine, where the system tells it."""


class LogitsCache:
    """Logits by the token sequences that they follow, for any number of models, within a budget of host memory.

    Parameters
    ----------
    max_bytes : int
        Budget of all nodes together, which is never exceeded. The least recently used leaf is evicted first. Logits
        that do not fit even so are not stored.
    top_k : int, optional
        Keep only this many of the highest logits per node, and the total probability of the others. This suffices for
        greedy decoding, a `top_k` up to this one, and `top_p` at temperature 1, where a node with too few logits is a
        miss. Other settings raise `ValueError`. Default: all logits.

    Notes
    -----
    `hits` counts lookups that found sufficient logits, `misses` the others; `num_bytes` is the memory of all nodes.
    Thread-safe. Source: Hive, section 6 and algorithm 1.
    """

    def __init__(self, max_bytes: int = 1 << 30, top_k: int | None = None) -> None:
        if not _is_positive_int(max_bytes):
            raise ValueError(f"max_bytes must be a positive int, got {max_bytes!r}")
        if top_k is not None and not _is_positive_int(top_k):
            raise ValueError(f"top_k must be a positive int or None, got {top_k!r}")
        self.max_bytes = max_bytes
        self.top_k = top_k
        self.salt = SALT  # of the keys of images; a loaded cache has that of its file
        self.hits = 0
        self.misses = 0
        self.num_bytes = 0
        self._roots: dict[str, TrieNode] = {}
        self._root_keys: dict[TrieNode, str] = {}
        self._vocabularies: dict[str, int] = {}  # of loaded logits
        self._clock = 0
        self.computing: dict[TrieNode, Any] = {}  # nodes whose logits the model computes, with the call that does
        self.lock = threading.RLock()
        self._queue: list[tuple[int, int, TrieNode]] = []  # heap of leaves by last use; entries may be outdated

    def __copy__(self) -> LogitsCache:
        return self  # `generate` copies settings; copies share the cache

    def __deepcopy__(self, memo: dict[int, object]) -> LogitsCache:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LogitsCache cannot be pickled: save(path) writes it, LogitsCache.load(path) reads it")

    def __len__(self) -> int:
        return sum(node.logits is not None for _, node in self.nodes())

    def __repr__(self) -> str:
        return f"LogitsCache({len(self)} nodes, {self.num_bytes} of {self.max_bytes} bytes)"

    def cursors(self) -> AbstractContextManager[Cursors]:
        """Open a set of cursors. Their nodes are pinned until the context exits."""
        return closing(Cursors(self))

    def nodes(self) -> Iterator[tuple[str, TrieNode]]:
        """Iterate over a snapshot of all nodes, parents first, each with the key of its model."""
        nodes: list[tuple[str, TrieNode]] = []
        with self.lock:  # not around a generator, which an interrupt may leave suspended
            stack = list(self._roots.items())
            while stack:
                key, node = stack.pop()
                nodes.append((key, node))
                stack.extend((key, child) for child in node.children.values())
        return iter(nodes)

    def children(self, node: TrieNode) -> list[TrieNode]:
        """Return a copy of the list of a node's children."""
        with self.lock:
            return list(node.children.values())

    def last_child(self, node: TrieNode) -> TrieNode | None:
        """Return the most recently used child, or None if there is none."""
        return max(self.children(node), key=lambda child: child.last_used, default=None)

    def clear(self) -> None:
        """Delete all nodes; the counters stay. Running calls continue, but store nothing on deleted nodes."""
        with self.lock:
            for _, node in list(self.nodes()):
                node.delete()
            self._roots = {}
            self._root_keys = {}
            self._vocabularies = {}
            self._queue = []
            self.num_bytes = 0

    def store_distribution(self, node: TrieNode, distribution: CachedDistribution) -> bool:
        """Replace a node's distribution. Return False if it does not fit, or the node is deleted or has no logits."""
        with self.lock:
            more = distribution.num_bytes - (0 if node.distribution is None else node.distribution.num_bytes)
            if not self.evict(more) or not node.alive or node.logits is None:
                return False
            node.distribution = distribution
            self.num_bytes += more
            return True

    def save(self, path: str | Path) -> None:
        """Write all nodes with their logits to a safetensors file, atomically; raise `OSError` if that fails."""
        with self.lock:
            tensors = {}
            for number, root in enumerate(self._roots.values()):
                for name, tensor in to_arrays(root).items():
                    tensors[f"{number}.{name}"] = tensor
            metadata = {
                "format": _FORMAT,
                "transformers": transformers.__version__,
                "salt": self.salt.hex(),
                "keys": json.dumps(list(self._roots)),
                "top_k": json.dumps(self.top_k),
            }
        metadata["digest"] = digest_of(metadata, tensors)
        with atomic_file(Path(path)) as temporary:
            try:
                save_file(tensors, temporary, metadata)
            except SafetensorError as error:
                raise OSError(f"{path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: str | Path, max_bytes: int = 1 << 30) -> LogitsCache:
        """Read a file written by `save`. Nodes beyond `max_bytes` are evicted, the least recently used first.

        Logs a warning if the file was saved under another version of transformers. Raises `ValueError` if the file is
        damaged or was not written by `save`, and `OSError` if it is missing, a folder or unreadable.
        """
        cache = cls(max_bytes)
        content = read_file(path, MAX_FILE_BYTES)
        try:
            metadata = read_metadata(content)
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}")
            warn_on_other_version(path, metadata["transformers"])
            tensors = load(content)
            del content
            if metadata.pop("digest") != digest_of(metadata, tensors):
                raise ValueError("its content does not match its digest")
            cache.top_k = cls(max_bytes, json.loads(metadata["top_k"])).top_k
            cache.salt = bytes.fromhex(metadata.get("salt", ""))[: len(SALT)]
            arrays_of: dict[str, dict[str, torch.Tensor]] = {}  # by number of the model's key
            for name, tensor in tensors.items():
                number, _, array_name = name.partition(".")
                arrays_of.setdefault(number, {})[array_name] = tensor
            for index, key in enumerate(read_keys(metadata["keys"])):
                arrays = arrays_of[str(index)]
                if int(arrays["vocabulary"]):  # otherwise there are no logits
                    check_arrays(arrays, cache.top_k)
                    cache._restore(key, arrays)
            cache.evict()
        except (SafetensorError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a readable LogitsCache: {error}") from error
        return cache

    def check_vocabulary(self, key: str, vocabulary: int) -> None:
        """Raise `ValueError` if the logits loaded for a model are not those of `vocabulary` tokens."""
        loaded = self._vocabularies.get(key, vocabulary)
        if loaded != vocabulary:
            raise ValueError(f"logits_cache was loaded with logits of {loaded} tokens, the model has {vocabulary}")

    def _restore(self, key: str, arrays: dict[str, torch.Tensor]) -> None:
        """Add the nodes of a file below a root, whatever the budget; the caller evicts what exceeds it."""
        nodes = [self._new_root(key)]
        self._vocabularies[key] = int(arrays["vocabulary"])
        tokens = arrays["tokens"].tolist()
        parents = arrays["parents"].tolist()
        times = arrays["used"].tolist()
        indices = arrays["places"].tolist()
        for token, parent, used, index in zip(tokens, parents, times, indices, strict=True):
            node = self._new_child(nodes[parent], token, alive=True)
            nodes.append(node)
            node.last_used = used
            self._clock = max(self._clock, used)
            if index >= 0:
                node.logits = logits_at(arrays, index)
                self.num_bytes += node.logits.num_bytes
        for node in nodes[1:]:
            self._enqueue(node)
        self._discard_if_bare(nodes[0])

    def root_key(self, model: str, cache_salt: str | None = None) -> str:
        """Return the key of the root of a model's sequences, given the model's fingerprint and who may read them.

        Calls with another `cache_salt` have other roots. The key does not tell the salt: files hold the keys.
        """
        if not cache_salt:
            return model
        digest = hmac.digest(self.salt, cache_salt.encode(errors="surrogatepass"), "sha256")
        return f"{digest.hex()} {model}"

    def root(self, key: str) -> TrieNode:
        """Return the root of a key. One that does not fit the budget is a root of no trie."""
        root = self._roots.get(key)
        if root is not None:
            return root
        if not self.evict(NODE_BYTES):
            return TrieNode(-1, None, alive=False)
        return self._new_root(key)

    def _new_root(self, key: str) -> TrieNode:
        root = TrieNode(-1, None)
        self._roots[key] = root
        self._root_keys[root] = key
        self.num_bytes += root.num_bytes
        return root

    def child(self, node: TrieNode, token: int) -> TrieNode:
        """Return the child with `token` of a pinned node, which is created if missing.

        A child that does not fit the budget belongs to no trie, nor do those below it: what a call computes there is
        not stored.
        """
        child = node.children.get(token)
        if child is None:
            child = self._new_child(node, token, alive=node.alive and self.evict(NODE_BYTES))
        return child

    def _new_child(self, node: TrieNode, token: int, alive: bool) -> TrieNode:
        child = TrieNode(token, weakref.ref(node), alive=alive)
        if alive:
            node.children[token] = child
            self.num_bytes += child.num_bytes
        return child

    def _enqueue(self, node: TrieNode) -> None:
        is_free_leaf = node.alive and not node.children and not node.pins and node.parent is not None
        if is_free_leaf and not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, id(node), node))

    def touch(self, node: TrieNode) -> None:
        """Mark a node as used now, and evict others."""
        self._clock += 1
        node.last_used = self._clock
        self.evict()

    def unpin(self, node: TrieNode) -> None:
        """Remove a cursor from a node, which may be evicted without one."""
        node.pins -= 1
        self._enqueue(node)
        self._discard_if_bare(node)

    def _discard_if_bare(self, root: TrieNode) -> None:
        """Delete a root that has neither children nor cursors."""
        key = self._root_keys.get(root)
        if key is None or root.children or root.pins:
            return
        self.num_bytes -= root.num_bytes
        root.delete()
        del self._roots[key]
        del self._root_keys[root]

    def store(self, node: TrieNode, logits: torch.Tensor) -> bool:
        """Store logits `[vocabulary]` at a node if they fit the budget; return whether the node has logits.

        Logits whose maximum is NaN or infinite are not stored: they come from a transient error of the model.
        """
        with self.lock:
            if node.logits is None and node.alive and math.isfinite(logits.max()):
                cached = CachedLogits.from_logits(logits, self.top_k)
                if self.evict(cached.num_bytes):
                    node.logits = cached
                    self.num_bytes += cached.num_bytes
            return node.logits is not None

    def evict(self, num_bytes: int = 0) -> bool:
        """Evict the least recently used leaves until `num_bytes` more fit the budget; returns whether they do."""
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
            self._discard_if_bare(parent)
        return self.num_bytes + num_bytes <= self.max_bytes


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Cursors:
    """Positions of rows in a trie: each row's cursor is the node of the row's tokens."""

    def __init__(self, cache: LogitsCache) -> None:
        self._cache = cache
        self._nodes: dict[int, TrieNode] = {}
        self._owners: dict[int, object] = {}

    def start(self, row: int, key: str, tokens: Sequence[int]) -> None:
        """Place a row's cursor on the node of the steps of a `LogitsKey`, `tokens`; `key` identifies the model."""
        cache = self._cache
        with cache.lock:
            node = cache.root(key)
            node.pins += 1  # new children evict others
            for token in tokens:
                child = cache.child(node, int(token))
                child.pins += 1
                cache.unpin(node)
                node = child
            self._place(row, node)
            cache.unpin(node)

    def advance(self, row: int, token: int) -> None:
        """Move a row's cursor to the child with `token`, or another step, which is created if missing."""
        with self._cache.lock:
            self._place(row, self._cache.child(self._nodes[row], int(token)))

    def lookup(self, row: int, count: int = 0, log_tail: float = np.inf) -> bool:
        """Return whether the row's node has sufficient logits (see `CachedLogits.covers`), and count a hit or miss."""
        with self._cache.lock:
            logits = self._nodes[row].logits
            is_hit = logits is not None and logits.covers(count, log_tail)
            if is_hit:
                self._cache.hits += 1
            else:
                self._cache.misses += 1
            return is_hit

    def store(self, row: int, logits: torch.Tensor) -> bool:
        """Store logits `[vocabulary]` at the row's node; see `LogitsCache.store`."""
        return self._cache.store(self._nodes[row], logits)

    def start_computing(self, rows: Iterable[int], owner: object) -> None:
        """Register a call that computes the logits of the rows' nodes, and of those after them, unless another does."""
        with self._cache.lock:
            for row in rows:
                self._owners[row] = owner
                self._cache.computing.setdefault(self._nodes[row], owner)

    def stop_computing(self, rows: Iterable[int]) -> None:
        """Unregister the call that computes the logits of rows: other calls wait for them no more."""
        with self._cache.lock:
            for row in rows:
                owner = self._owners.pop(row, None)
                node = self._nodes.get(row)
                if node is not None and self._cache.computing.get(node) is owner:
                    self._cache.computing.pop(node, None)

    def computed_by(self, row: int) -> Any | None:
        """Return the call that computes the row's missing logits, or None."""
        with self._cache.lock:
            node = self._nodes[row]
            return self._cache.computing.get(node) if node.logits is None else None

    def node(self, row: int) -> TrieNode:
        """Return the row's node."""
        return self._nodes[row]

    def close(self) -> None:
        """Unpin all nodes."""
        with self._cache.lock:
            for row in list(self._nodes):
                self._unpin(row)
            self._cache.evict()

    def _place(self, row: int, node: TrieNode) -> None:
        node.pins += 1  # before the old node is unpinned, which may be the same one
        if row in self._nodes:
            self._unpin(row)
        self._nodes[row] = node
        if row in self._owners:
            self._cache.computing.setdefault(node, self._owners[row])
        self._cache.touch(node)

    def _unpin(self, row: int) -> None:
        node = self._nodes.pop(row)
        if row in self._owners and self._cache.computing.get(node) is self._owners[row]:
            del self._cache.computing[node]
        self._cache.unpin(node)
