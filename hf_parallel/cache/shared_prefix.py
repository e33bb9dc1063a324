"""`SharedPrefixCache`: a radix tree of token sequences, each stored once (Hydragen, section 3.3).

A node holds a sequence of tokens and the block of their keys and values. A row sees the blocks from the root to its
leaf. Keys are stored at their true positions, so nothing is ever rotated. Prefixes are shared within an identity only:
each has a root of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.cache.base import BlockCache
from hf_parallel.cache.fingerprint import fingerprint_of_present
from hf_parallel.cache.layout import Block
from hf_parallel.cache.placement import execution_device
from hf_parallel.kernels import RotarySpec

_lock = threading.Lock()


@dataclass(eq=False)
class Node:
    """A token sequence in the tree."""

    tokens: np.ndarray  # int64 [length]
    parent: Node | None = None
    block: Block | None = None  # keys and values of `tokens`, as far as they have been prefilled
    children: dict[int, list[Node]] = field(default_factory=dict)  # by first token, which several may share
    last_used: int = 0  # index of the last call that used the node or a descendant
    is_finite: bool = False  # whether keys and values were found to be finite
    identity: Hashable = None  # of a root: what its prefixes have in common apart from tokens, such as a salt
    gap: int = 0  # masked tokens before the first one, as far as sliding windows count them

    @property
    def siblings(self) -> list[Node]:
        """The parent's children with the same first token, this node included."""
        assert self.parent is not None, "the root has no siblings"
        return self.parent.children[int(self.tokens[0])]

    @property
    def path(self) -> list[Node]:
        """Nodes from the root (excluded) to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def start(self) -> int:
        """Position of the first token."""
        return sum(len(node.tokens) for node in self.path[:-1])

    def all_children(self) -> list[Node]:
        """Return the children, whatever their first token."""
        return [child for siblings in self.children.values() for child in siblings]

    @property
    def uncached(self) -> np.ndarray:
        """Tokens whose keys and values are not in the block yet."""
        return self.tokens if self.block is None else self.tokens[self.block.length :]


class SharedPrefixCache(BlockCache):
    """Prompts and completions as a tree of shared prefixes.

    Pass it again as `past_key_values`: prefixes that new prompts share with earlier prompts or completions are not
    computed again.

    Parameters
    ----------
    rotary, device
        See `BlockCache`; neither is needed.
    max_bytes : int, optional
        Maximum bytes of keys and values kept between calls. Each call first evicts the least recently used nodes,
        leaves first, until the rest fits; its own tokens come on top. Default: keep everything until `reset()`.

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
        self._filled_by: tuple[str, str] | None = None  # fingerprint and device of the model; None: not known
        self._user: Any = None  # the call that claimed the cache last

    def claim(
        self, model: PreTrainedModel, user: Any = None, kept: bool = True, fingerprint: str | None = None
    ) -> None:
        """Start a call of `model`: check that the cache was filled by it, and evict down to `max_bytes`.

        `user` represents the call: while its `active` is true, no other call can claim the cache. `kept` says whether
        the cache outlives the call. If so, the fingerprint of the model is compared, which reads all its weights once
        if it is not given. Values of offloaded weights do not count.

        Raises
        ------
        ValueError
            If the cache was filled by another model, or before the model's weights, adapters or dropout changed.
        RuntimeError
            If another call uses the cache.
        """
        with _lock:
            if self._user is not None and self._user.active and self._user is not user:
                raise RuntimeError("past_key_values is in use by another call: give each of them a cache of its own")
            self._user = user
        if not self.blocks and not self._has_device:
            self.device = execution_device(model)
        key = (fingerprint or fingerprint_of_present(model), str(execution_device(model))) if kept else None
        if kept and key != self._filled_by and any(True for _ in self.nodes()):  # blocks of `rows` are not reused
            raise ValueError(
                "past_key_values was filled by another model, or before the model's weights changed: reset() it first, "
                "or pass a new cache"
            )
        self._filled_by = key
        self._calls += 1
        self._evict()

    def record_weights(self, model: PreTrainedModel, fingerprint: str) -> None:
        """Record the fingerprint of the weights that filled the cache, for calls that receive it later."""
        self._filled_by = fingerprint, str(execution_device(model))

    def insert(self, tokens: np.ndarray, root: Node | None = None, gap: int = 0) -> Node:
        """Insert tokens, int64 `[length]`, after `root` (default: the root of the tree). Return the last token's node.

        Reuses nodes of the tree, splits them where necessary, and creates the rest. `gap`: see `Node`.
        """
        node, rest = root or self.root, tokens
        while len(rest):
            child, shared = self._best_child(node, rest, gap)
            if child is None:
                node = self.add(node, rest)
                node.gap = gap
                return node
            node, rest = child if shared == len(child.tokens) else self._split(child, shared), rest[shared:]
            node.last_used, gap = self._calls, 0
        return node

    def insert_prompt(self, tokens: np.ndarray, gaps: Mapping[int, int]) -> Node:
        """Insert a prompt; `gaps` is the number of masked tokens before the token at an index (`GenerationCall`)."""
        node, starts = self.root, [0, *gaps]
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            node = self.insert(tokens[start:stop], node, gaps.get(start, 0))
        return node

    def add(self, parent: Node, tokens: np.ndarray, block: Block | None = None) -> Node:
        """Append a node to `parent`, without a search for shared prefixes.

        `block` holds the keys and values of a finished completion; tokens beyond its length are dropped. An empty block
        is freed, and `parent` is returned.
        """
        if block is not None and not block.length:
            self.free(block)
            return parent
        held = tokens if block is None else tokens[: block.length]
        node = Node(np.asarray(held, np.int64), parent, block, last_used=self._calls)
        parent.children.setdefault(int(node.tokens[0]), []).append(node)
        return node

    def retain(self, tokens: np.ndarray) -> None:
        """Remove all tokens from the tree but those of the longest cached prefix of `tokens`, int64 `[length]`."""
        node, rest = self.root, tokens
        while True:
            child, shared = self._best_child(node, rest) if len(rest) else (None, 0)
            if child is not None and shared < len(child.tokens):
                child = self._split(child, shared)
            for other in node.all_children():
                if other is not child:
                    self._remove(other)
            if child is None:
                return
            node, rest = child, rest[shared:]

    def end_call(self) -> None:
        """Free blocks that a call has neither attached to the tree nor freed, and remove what it did not compute.

        Blocks of `rows`, which plain forward passes continue, stay.
        """
        attached = {node.block for node in self.nodes()}.union(*self.rows)
        for block in self.blocks - attached:
            self.free(block)
        self.discard_uncached()
        self.discard_nonfinite()

    def discard_nonfinite(self) -> None:
        """Remove nodes with keys or values that are not finite, as a transient error of the model leaves them.

        Reads the last layer only, which a NaN or infinity in any earlier layer reaches.
        """
        layer = self.arena.layers.get(max(self.arena.layers, default=-1))
        nodes = [node for node in self.nodes() if node.block is not None and node.block.length and not node.is_finite]
        if layer is None or not nodes:
            return
        rows = [layer.rows(node.block.tokens) for node in nodes if node.block is not None]
        finite = [layer.keys[held].isfinite().all() & layer.values[held].isfinite().all() for held in rows]
        for node, is_finite in zip(nodes, torch.stack(finite).tolist(), strict=True):
            node.is_finite = is_finite
            if not is_finite and node in node.siblings:
                self._remove(node)
        if not all(node.is_finite for node in nodes):
            self.clear_unused()

    def clear_unused(self) -> None:
        """Overwrite all unused memory with zeros: attention may read it with weight 0, which does not hide a NaN."""
        for layer in self.arena.layers.values():
            unused = torch.ones(len(layer.keys), dtype=torch.bool, device=layer.keys.device)
            for block in self.blocks:
                unused[layer.rows(block.tokens)] = False
            layer.keys[unused], layer.values[unused] = 0, 0

    def view(self, node: Node) -> list[Block]:
        """Return the blocks that a row at `node` sees."""
        return [child.block for child in node.path if child.block is not None]

    def nodes_to_prefill(self) -> list[Node]:
        """Return nodes with uncached tokens, parents before children, and allocate their blocks."""
        nodes = [node for node in self.nodes() if len(node.uncached)]
        for node in nodes:
            if node.block is None:
                node.block = self.new_block(len(node.tokens), base=node.start)
                node.block.gap = node.gap
        return nodes

    def discard_uncached(self) -> None:
        """Remove uncached tokens from the tree, after a prefill that failed."""
        for node in list(self.nodes()):
            if not len(node.uncached) or node not in node.siblings:
                continue
            if node.block is None or not node.block.length:
                self._remove(node)
            else:
                node.tokens = node.tokens[: node.block.length]
                for child in node.all_children():
                    self._remove(child)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of all identities except the roots, parents before children."""
        stack = [child for root in self.roots.values() for child in root.all_children()][::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.all_children()[::-1])

    def reset(self) -> None:
        """Delete everything and release all memory; the cache can then be used with another model."""
        super().reset()
        self.root = Node(np.empty(0, np.int64))
        self.roots = {self.root.identity: self.root}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_user": None}

    def _evict(self) -> None:
        """Remove the least recently used nodes, leaves first, until at most `max_bytes` are held."""
        if self.max_bytes is None:
            return
        held, per_token = self.kv_bytes, self.arena.bytes_per_token
        children_first = [*self.nodes()][::-1]
        for node in sorted(children_first, key=lambda node: node.last_used):
            if held <= self.max_bytes:
                return
            held -= 0 if node.block is None else node.block.length * per_token
            self._remove(node)

    def _remove(self, node: Node) -> None:
        for child in node.all_children():
            self._remove(child)
        if node.block is not None:
            self.free(node.block)
        node.siblings.remove(node)

    def _split_block(self, block: Block, at: int) -> tuple[Block, Block]:
        """Split the block of a node; return the blocks of its head and tail."""
        return block, self.split(block, at)

    @staticmethod
    def _best_child(node: Node, tokens: np.ndarray, gap: int = 0) -> tuple[Node | None, int]:
        """Return the child with the longest common prefix with `tokens`, and the length of that prefix."""
        children = node.children.get(int(tokens[0]), ())
        shared = [(child, common_prefix(child.tokens, tokens)) for child in children if child.gap == gap]
        return max(shared, key=lambda pair: pair[1], default=(None, 0))

    def _split(self, node: Node, at: int) -> Node:
        """Split a node in two without copying. The node keeps the tail, as it is the leaf of rows; returns the head."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        head = Node(node.tokens[:at], parent, children={int(node.tokens[at]): [node]}, is_finite=node.is_finite)
        head.gap, node.gap = node.gap, 0
        node.siblings[node.siblings.index(node)] = head
        if node.block is not None:
            head.block, node.block = self._split_block(node.block, at)
        node.tokens, node.parent = node.tokens[at:], head
        return head


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens with which two sequences, int64 `[length]` each, begin alike."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
