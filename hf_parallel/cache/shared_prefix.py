"""SharedPrefixCache: a radix tree of token runs, each stored once (Hydragen, section 3.3).

A node is a run of tokens and the block of their keys and values. A row sees the blocks from the root to its leaf.
Its keys stand at their true positions, so nothing is ever turned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..kernels import RotarySpec
from .base import BlockCache
from .layout import Block


@dataclass(eq=False)
class Node:
    """A run of `tokens` below `parent`; `block` holds their keys and values once they have been prefilled."""

    tokens: np.ndarray
    parent: Node | None = None
    block: Block | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def start(self) -> int:
        """Position of the node's first token."""
        return sum(len(node.tokens) for node in self.path[:-1])

    @property
    def missing(self) -> np.ndarray:
        """Tokens whose keys and values are not held yet."""
        return self.tokens if self.block is None else self.tokens[self.block.length :]


class SharedPrefixCache(BlockCache):
    """What has been read so far, as a tree of shared prefixes.

    Keep it and pass it again as `past_key_values`: whatever the new prompts share with anything in the tree, prompts
    and completions alike, is not computed again.

    Examples
    --------
    >>> cache = hf_parallel.SharedPrefixCache()
    >>> model.generate(ids, generation_mode="shared_prefix", past_key_values=cache, num_return_sequences=16)
    >>> model.generate(ids_and_more, generation_mode="shared_prefix", past_key_values=cache)
    """

    def __init__(
        self, rotary: Mapping[int, RotarySpec | None] | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__(rotary, device)
        self.root = Node(np.empty(0, np.int64))
        self._filled_by: weakref.ref[Any] | None = None

    def claim(self, model: Any) -> None:
        """Say which model fills the cache from now on.

        Raises
        ------
        ValueError
            If it holds the keys and values of another one.
        """
        if self.blocks and self._filled_by is not None and self._filled_by() is not model:
            raise ValueError("past_key_values was filled by another model, whose keys and values it holds")
        self._filled_by = weakref.ref(model)

    def insert(self, tokens: np.ndarray) -> Node:
        """Find or make the leaf whose path spells `tokens`, sharing all that the tree has of them.

        Parameters
        ----------
        tokens : int64 [length]
            At least one.
        """
        node, rest = self.root, tokens
        while len(rest):
            child, shared = self._best_child(node, rest)
            if child is None:
                return self.add(node, rest)
            node, rest = child if shared == len(child.tokens) else self._split(child, shared), rest[shared:]
        return node

    def add(self, parent: Node, tokens: np.ndarray) -> Node:
        """Append a node below `parent`, without looking for what is alike."""
        node = Node(np.asarray(tokens, np.int64), parent)
        parent.children.append(node)
        return node

    def attach(self, parent: Node, tokens: np.ndarray, block: Block) -> Node:
        """Append a node whose block is filled already, such as a finished completion."""
        node = self.add(parent, tokens[: block.length])
        node.block = block
        return node

    def view(self, node: Node) -> list[Block]:
        """Blocks that a row at `node` sees."""
        return [child.block for child in node.path if child.block is not None]

    def unfilled(self) -> list[Node]:
        """Nodes whose tokens must still be prefilled, parents before children; each gets its block here."""
        nodes = [node for node in self.nodes() if len(node.missing)]
        for node in nodes:
            if node.block is None:
                node.block = self.new_block(len(node.tokens), base=node.start)
        return nodes

    def discard_unfilled(self) -> None:
        """Cut the tree back to what is held, after a prefill that did not come to its end."""
        for node in list(self.nodes()):
            if node.parent is None or node not in node.parent.children or not len(node.missing):
                continue
            held = 0 if node.block is None else node.block.length
            if held:
                node.tokens = node.tokens[:held]
                for child in list(node.children):
                    self._remove(child)
            else:
                self._remove(node)

    def forget_completions(self, leaves: Sequence[Node]) -> None:
        """Drop everything below the given nodes."""
        for leaf in leaves:
            for child in list(leaf.children):
                self._remove(child)

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents before children."""
        stack = self.root.children[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children[::-1])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.root = Node(np.empty(0, np.int64))

    def _remove(self, node: Node) -> None:
        for child in list(node.children):
            self._remove(child)
        if node.block is not None:
            self.free(node.block)
        if node.parent is not None:
            node.parent.children.remove(node)

    @staticmethod
    def _best_child(node: Node, tokens: np.ndarray) -> tuple[Node | None, int]:
        """The child that shares most with `tokens`, and how many tokens it shares; completions may begin alike."""
        best, most = None, 0
        for child in node.children:
            shared = _common(child.tokens, tokens)
            if shared > most:
                best, most = child, shared
        return best, most

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two without copying. It keeps its end, as leaf of whoever holds it; returns the new head."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        head = Node(node.tokens[:at], parent, children=[node])
        parent.children[parent.children.index(node)] = head
        if node.block is not None:
            head.block = node.block
            node.block = self.split(node.block, at)
        node.tokens, node.parent = node.tokens[at:], head
        return head


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two runs of tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
