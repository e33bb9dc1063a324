"""Prefixes: the part of a prefix tree that a cache uses. By default, this is all of a tree of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hf_parallel.cache.pool import Block
from hf_parallel.cache.tree import Node, PrefixTree


class Prefixes:
    """All prefixes of a tree. The tree and the rows of the cache share one pool of blocks."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.pool = tree.pool
        self.root = tree.root

    def insert(self, tokens: np.ndarray, root: Node, gap: int) -> Node:
        """Insert tokens, int64 `[length]`, after `root`; see `PrefixTree.insert`."""
        return self.tree.insert(tokens, root, gap)

    def add(self, parent: Node, tokens: np.ndarray, block: Block | None) -> Node:
        """Append a node to `parent`, with a block of the pool; see `PrefixTree.add`."""
        return self.tree.add(parent, tokens, block)

    def release(self, nodes: Collection[Node]) -> None:
        """Remove nodes, children first, unless others follow them, and free their blocks."""
        for node in nodes:
            if not node.all_children():
                self.tree.discard(node)

    def nodes_to_prefill(self) -> list[Node]:
        """Return nodes with uncached tokens; see `PrefixTree.nodes_to_prefill`."""
        return self.tree.nodes_to_prefill()

    def discard_uncached(self) -> None:
        """Remove uncached tokens; see `PrefixTree.discard_uncached`."""
        self.tree.discard_uncached()

    def clear(self) -> None:
        """Delete all nodes, as their blocks were freed."""
        self.tree.clear()
        self.root = self.tree.root

    def lent_blocks(self) -> Sequence[Block]:
        """Return the blocks that the cache uses and that are not in its pool."""
        return ()
