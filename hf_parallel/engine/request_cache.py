"""RequestCache: blocks of one request in the storage of an engine, in the place of the cache that its mode creates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hf_parallel.cache.layout import Block
from hf_parallel.cache.shared_prefix import Node, SharedPrefixCache
from hf_parallel.engine.journal import Journal
from hf_parallel.engine.storage import KVStorage, cached_length


class RequestCache(SharedPrefixCache):
    """Mixed into the class of a mode's cache: blocks of one request in the storage of an engine.

    `blocks` are those of the request alone. Prompts become nodes of the storage's tree.
    """

    storage_of_all: KVStorage
    request: Any

    def attach(self, storage: KVStorage, request: Any, journal: Journal) -> None:
        """Use the storage of an engine."""
        self.storage_of_all, self.request, self.trace = storage, request, journal  # type: ignore[assignment]
        self.arena, self.root = storage.arena, storage.add_request(request)

    def reset(self) -> None:
        """Free the request's own blocks."""
        if not hasattr(self, "storage_of_all"):
            super().reset()
            return
        for block in list(self.blocks):
            self.free(block)

    def claim(self, model: Any, user: Any = None, kept: bool = True, fingerprint: str | None = None) -> None:
        """Do nothing: the engine holds the model, and checks its weights."""

    def new_blocks(self, count: int, capacity: int = 0, base: int = 0) -> list[Block]:
        """Return empty blocks; their memory is allocated when tokens are appended."""
        blocks = self.storage_of_all.new_blocks(count, 0, base)
        self.blocks.update(blocks)
        return blocks

    def free(self, block: Block) -> None:
        """See `BlockCache.free`."""
        self.check_owned(block)
        self.blocks.discard(block)
        self.storage_of_all.free(block)

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """See `KVStorage.reserve`."""
        self.storage_of_all.reserve(wanted)

    def check_owned(self, block: Block) -> None:
        """See `BlockCache.check_owned`: blocks of the request, and of the tree."""
        if block not in self.blocks:
            self.storage_of_all.check_owned(block)

    def insert(self, tokens: np.ndarray, root: Node | None = None, gap: int = 0) -> Node:
        """See `SharedPrefixCache.insert`. Waits while another request computes a part of the prefix.

        Before that, it computes its own nodes: else two requests could wait for each other.
        """
        is_own = False
        while any(map(self.is_computed_by_other, self._matching(tokens, root or self.root, gap))):
            if is_own:
                self.request.wait()
            else:
                self.request.fill(self)
                is_own = True
        node = self.storage_of_all.insert(tokens, root or self.root, gap)
        self.storage_of_all.pin(node, self.request)
        self.storage_of_all.start_computing([one for one in node.path if len(one.uncached)], self.request)
        return node

    def _matching(self, tokens: np.ndarray, node: Node, gap: int) -> list[Node]:
        """Return the nodes that share tokens with a sequence, the last one perhaps only in part."""
        path = []
        while len(tokens):
            child, shared = self._best_child(node, tokens, gap)
            if child is None:
                break
            path.append(child)
            if shared < len(child.tokens):
                break
            node, tokens, gap = child, tokens[shared:], 0
        return path

    def _cached(self, parent: Node, tokens: np.ndarray) -> Node | None:
        """Return the child of a node that begins with some tokens, if their keys and values are cached."""
        child, shared = self._best_child(parent, tokens)
        return child if child is not None and shared == len(tokens) <= cached_length(child) else None

    def is_computed_by_other(self, node: Node) -> bool:
        """Return whether another request computes a node, or will continue to, once it is resumed."""
        return len(node.uncached) > 0 and self.storage_of_all.computing.get(node, self.request) is not self.request

    def add(self, parent: Node, tokens: np.ndarray, block: Block | None = None) -> Node:
        """See `SharedPrefixCache.add`. The block becomes one of the tree, or is freed if the tree has its tokens."""
        if block is not None and not block.length:
            self.free(block)
            return parent
        found = None if block is None else self._cached(parent, tokens[: block.length])
        if found is not None and block is not None:
            self.free(block)
            self.storage_of_all.pin(found, self.request)
            return found
        node = self.storage_of_all.add(parent, tokens, block)
        if block is not None:
            self.blocks.discard(block)
        self.storage_of_all.pin(node, self.request)
        return node

    def nodes_to_prefill(self) -> list[Node]:
        """See `SharedPrefixCache.nodes_to_prefill`; only nodes of this request."""
        storage = self.storage_of_all
        nodes = [node for node in storage.pinned(self.request) if len(node.uncached)]
        for node in nodes:
            if node.block is None:
                node.block = storage.new_block(base=node.start)
                node.block.gap = node.gap
        return nodes

    def discard_uncached(self) -> None:
        """Remove tokens that the request was to compute."""
        storage = self.storage_of_all
        for node in [*storage.pinned(self.request)][::-1]:
            if len(node.uncached) and storage.pins[node] == {self.request}:
                del storage.pins[node]
                storage.computing.pop(node, None)
                storage.trim(node)

    def discard_nonfinite(self) -> None:
        """Do nothing: the engine checks the logits."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that the request uses."""
        nodes = [node.block.length for node in self.storage_of_all.pinned(self.request) if node.block is not None]
        return (sum(nodes) + sum(block.length for block in self.blocks)) * self.arena.bytes_per_token

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of the tree."""
        return self.storage_of_all.nodes()


@lru_cache
def request_cache_class(cls: Any) -> Any:
    """Return a mode's cache class, over the storage of an engine."""
    return type(cls.__name__, (RequestCache, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
