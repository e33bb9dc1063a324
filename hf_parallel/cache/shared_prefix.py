"""SharedPrefixCache: a radix tree of token runs, each stored once (Hydragen, section 3.3).

A node is a run of tokens and the block of their keys and values. A row sees the blocks from the root to its leaf.
Its keys stand at their true positions, so nothing is ever turned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_parallel.cache.base import BlockCache
from hf_parallel.cache.layout import Block
from hf_parallel.kernels import RotarySpec


@dataclass(eq=False)
class Node:
    """A run of `tokens` below `parent`; `block` holds their keys and values once they have been prefilled.

    `used` is the number of the last call that had to do with it; what is below it was used no later.
    """

    tokens: np.ndarray
    parent: Node | None = None
    block: Block | None = None
    children: dict[int, list[Node]] = field(default_factory=dict)  # by their first token; completions may begin alike
    used: int = 0

    @property
    def alike(self) -> list[Node]:
        """The node and its siblings that begin with the same token."""
        assert self.parent is not None, "the root has no tokens to begin with"
        return self.parent.children[int(self.tokens[0])]

    @property
    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> list[Node]:
        """Its children."""
        return [child for alike in self.children.values() for child in alike]

    @property
    def start(self) -> int:
        """Position of the node's first token."""
        return sum(len(node.tokens) for node in self.path[:-1])

    @property
    def missing(self) -> np.ndarray:
        """Tokens whose keys and values are not held yet."""
        return self.tokens if self.block is None else self.tokens[self.block.length :]


class Weights:
    """A model's weights as they are now, to be told from later ones. A pickle holds None: it may be read elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._state = self._read(model)

    def of(self, model: nn.Module) -> bool:
        """Whether they are this model's, whatever has been done to it since."""
        return self._model() is model

    def unchanged(self) -> bool:
        """Whether nobody has exchanged a parameter or written to one, but through `.data`."""
        model = self._model()
        return model is not None and self._read(model) == self._state

    @staticmethod
    def _read(model: nn.Module) -> list[tuple[int, int]]:
        """Each parameter and how often it was written to; those on the meta device are exchanged at every use."""
        present = (parameter for parameter in model.parameters() if not parameter.is_meta)
        return [(id(parameter), 0 if parameter.is_inference() else parameter._version) for parameter in present]

    def __deepcopy__(self, memo: Any) -> Weights:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class SharedPrefixCache(BlockCache):
    """What has been read so far, as a tree of shared prefixes.

    Keep it and pass it again as `past_key_values`: whatever the new prompts share with anything in the tree, prompts
    and completions alike, is not computed again.

    Parameters
    ----------
    rotary, device
        See `BlockCache`; neither is needed.
    max_bytes : int, optional
        Keys and values that are kept from call to call. When a call begins, what earlier ones used longest ago goes
        first, completions before what they follow from; what the call itself reads and writes comes on top. Default:
        all are kept, until `reset()`.

    Examples
    --------
    >>> cache = hf_parallel.SharedPrefixCache()
    >>> model.generate(ids, generation_mode="shared_prefix", past_key_values=cache, num_return_sequences=16)
    >>> model.generate(ids_and_more, generation_mode="shared_prefix", past_key_values=cache)
    """

    def __init__(
        self,
        rotary: Mapping[int, RotarySpec | None] | None = None,
        device: torch.device | str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(rotary, device)
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1):
            raise ValueError(f"max_bytes must be a positive int or None, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self._calls = 0
        self.root = Node(np.empty(0, np.int64))
        self._filled_by: Weights | None = None

    def claim(self, model: nn.Module) -> None:
        """Begin a call: say which model fills the cache from now on, and forget what is more than `max_bytes`.

        Raises
        ------
        ValueError
            If it holds the keys and values of another one, or of other weights of it.
        """
        if self.blocks and self._filled_by is not None:
            if not self._filled_by.of(model):
                raise ValueError("past_key_values was filled by another model, whose keys and values it holds")
            if not self._filled_by.unchanged():
                raise ValueError("past_key_values was filled before the model's weights changed: reset() it first")
        else:
            self._filled_by = Weights(model)
        self._calls += 1
        self._evict()

    def insert(self, tokens: np.ndarray, below: Node | None = None) -> Node:
        """Find or make the leaf whose path spells `tokens`, sharing all that the tree has of them.

        Parameters
        ----------
        tokens : int64 [length]
            At least one.
        below : Node, optional
            Where the path begins. Default: the root.
        """
        node, rest = self.root if below is None else below, tokens
        while len(rest):
            child, shared = self._best_child(node, rest)
            if child is None:
                return self.add(node, rest)
            node, rest = child if shared == len(child.tokens) else self._split(child, shared), rest[shared:]
            node.used = self._calls
        return node

    def add(self, parent: Node, tokens: np.ndarray) -> Node:
        """Append a node below `parent`, without looking for what is alike."""
        node = Node(np.asarray(tokens, np.int64), parent, used=self._calls)
        parent.children.setdefault(int(node.tokens[0]), []).append(node)
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
            if node not in node.alike or not len(node.missing):
                continue
            held = 0 if node.block is None else node.block.length
            if held:
                node.tokens = node.tokens[:held]
                for child in node.below():
                    self._remove(child)
            else:
                self._remove(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents before children."""
        stack = self.root.below()[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.below()[::-1])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.root = Node(np.empty(0, np.int64))

    def _evict(self) -> None:
        """Forget what was used longest ago, ends before what leads to them, until no more than `max_bytes` is held."""
        if self.max_bytes is None:
            return
        held, per_token = self.kv_bytes, self.arena.bytes_per_token
        children_first = [*self.nodes()][::-1]
        for node in sorted(children_first, key=lambda node: node.used):
            if held <= self.max_bytes:
                return
            held -= 0 if node.block is None else node.block.length * per_token
            self._remove(node)

    def _remove(self, node: Node) -> None:
        for child in node.below():
            self._remove(child)
        if node.block is not None:
            self.free(node.block)
        node.alike.remove(node)

    @staticmethod
    def _best_child(node: Node, tokens: np.ndarray) -> tuple[Node | None, int]:
        """The child that shares most with `tokens`, and how many tokens it shares; completions may begin alike."""
        best, most = None, 0
        for child in node.children.get(int(tokens[0]), ()):
            shared = _common(child.tokens, tokens)
            if shared > most:
                best, most = child, shared
        return best, most

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two without copying. It keeps its end, as leaf of whoever holds it; returns the new head."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        head = Node(node.tokens[:at], parent, children={int(node.tokens[at]): [node]})
        node.alike[node.alike.index(node)] = head
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
