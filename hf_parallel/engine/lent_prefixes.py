"""LentPrefixes: what an engine lends of its prefix tree to a request, for the caches of the request's call."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hf_parallel.cache.pool import Block, Pool
from hf_parallel.cache.prefixes import Prefixes
from hf_parallel.cache.tree import Node, Owner, PrefixTree
from hf_parallel.kernels import RotarySpec


class LentPrefixes(Prefixes):
    """The prefixes that a request uses, of those of one identity.

    The request pins the nodes that it uses, and computes those that it inserts. Other requests wait for these. Blocks
    of the tree stay when the request ends.
    """

    def __init__(self, tree: PrefixTree, rotary: Mapping[int, RotarySpec | None] | None, request: Owner) -> None:
        super().__init__(tree)
        self.pool = Pool(rotary, parent=tree.pool)  # for blocks of the request outside the tree
        self.root = tree.add_owner(request)
        self._request = request

    def insert(self, tokens: np.ndarray, root: Node, gap: int) -> Node:
        """Insert tokens. Raises `RuntimeError` if another request computes any of them now."""
        matching = self.tree.matching(tokens, root, gap)
        if any(self.tree.is_computed_by_other(node, self._request) for node in matching):
            raise RuntimeError("another request computes this prefix: insert it with `yield from insert(...)`")
        leaf = self.tree.insert(tokens, root, gap)
        self.tree.pin(leaf, self._request)
        uncached = [node for node in leaf.path if len(node.uncached)]
        self.tree.start_computing(uncached, self._request)
        return leaf

    def add(self, parent: Node, tokens: np.ndarray, block: Block | None) -> Node:
        """Append a node, and give its block to the engine. A block whose tokens the tree has already is freed."""
        node = None
        if block is not None:
            node = self.tree.cached_child(parent, tokens[: block.length])
            if node is None:
                self.pool.disown(block)
            else:
                self.pool.free(block)
        if node is None:
            node = self.tree.add(parent, tokens, block)
        self.tree.pin(node, self._request)
        return node

    def release(self, nodes: Collection[Node]) -> None:
        """Unpin nodes, whose keys and values stay until the engine evicts them."""
        self.tree.unpin_nodes(nodes, self._request)

    def nodes_to_prefill(self) -> list[Node]:
        return self.tree.nodes_to_prefill(self._request)

    def discard_uncached(self) -> None:
        self.tree.discard_uncached(self._request)

    def clear(self) -> None:
        """Do nothing: the engine ends the use of its nodes with the request."""

    def lent_blocks(self) -> list[Block]:
        return [node.block for node in self.tree.pinned(self._request) if node.block is not None]
