"""PrefixTree: a radix tree of token sequences, whose keys and values are blocks of a pool (Hydragen, section 3.3).

A node holds a sequence of tokens and the block of their keys and values. A row sees the blocks from the root to its
leaf. Keys are stored at their true positions, so nothing is ever rotated. Prefixes are shared within an identity only:
each has a root of its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from hf_parallel.cache.pool import Block, Pool


@dataclass(eq=False)
class Node:
    """A token sequence in the tree."""

    tokens: np.ndarray  # int64 [length]
    parent: Node | None = None
    block: Block | None = None  # keys and values of `tokens`, as far as they have been prefilled
    children: dict[int, list[Node]] = field(default_factory=dict)  # by first token, which several may share
    last_used: int = 0  # time of the last use of the node or a descendant, see `PrefixTree.clock`
    is_finite: bool = False  # whether keys and values were found to be finite
    identity: Hashable = None  # of a root: what its prefixes have in common apart from tokens, such as a salt
    gap: int = 0  # masked tokens before the first one, as far as sliding windows count them
    shift: int = 0  # by how much the positions after it differ from its number of tokens, after an image

    @property
    def siblings(self) -> list[Node]:
        """The parent's children with the same first token, this node included."""
        assert self.parent is not None, "the root has no siblings"
        return self.parent.children[int(self.tokens[0])]

    @property
    def path(self) -> list[Node]:
        """Nodes from the root (excluded) to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def start(self) -> int:
        """Number of tokens before the first one."""
        return sum(len(node.tokens) for node in self.path[:-1])

    @property
    def next_position(self) -> int:
        """Position of the token after the last one."""
        return sum(len(node.tokens) + node.shift for node in self.path)

    @property
    def view(self) -> list[Block]:
        """Blocks that a row at the node sees."""
        return [node.block for node in self.path if node.block is not None]

    def has_state_until(self, length: int) -> bool:
        """Return whether the state after the first `length` tokens is kept, or will be computed."""
        if self.block is None or not self.block.length:
            return True
        return self.block.length <= length and (self.block.has_state or self.is_state_dropped)

    @property
    def is_state_dropped(self) -> bool:
        """Whether the state after its tokens was dropped, and is computed again; see `PrefixTree.drop_states`."""
        return self.num_cached > 0 and self.block.state < 0  # type: ignore[union-attr]

    def all_children(self) -> list[Node]:
        """Return the children, whatever their first token."""
        return [child for siblings in self.children.values() for child in siblings]

    @property
    def num_cached(self) -> int:
        """Number of tokens whose keys and values are in the block."""
        return 0 if self.block is None else self.block.length

    @property
    def uncached(self) -> np.ndarray:
        """Tokens whose keys and values are not in the block yet."""
        return self.tokens if self.block is None else self.tokens[self.block.length :]


class Owner(Protocol):
    """A request that shares a tree with others. It pins the nodes it uses and marks the nodes it computes."""

    @property
    def identity(self) -> Hashable:
        """Identity of the root of its prefixes."""

    is_request: bool
    """Whether it is a request, which the observer of the tree follows, and not a lease."""

    preempted: bool
    """Whether it has lost its keys and values, so that nodes which it alone pins can be evicted."""

    @property
    def reads(self) -> Collection[Block]:
        """Blocks from whose states its next pass continues."""


class RequestObserver:
    """Base of policies that follow requests. The engine's thread calls the methods, which do nothing here.

    A request has `hints` (`AgentHints`) and `num_tokens`, the number of tokens generated so far.
    """

    def on_use(self, request: Any, nodes: Sequence[Node]) -> None:
        """Receive the nodes that a request starts to use, new nodes included, parents before children."""

    def on_end(self, request: Any, nodes: Sequence[Node]) -> None:
        """Receive the nodes that a request has used, as it ends or starts again."""

    def on_split(self, head: Node, tail: Node) -> None:
        """Receive a new node `head`, which has taken over the first tokens of `tail`."""

    def on_evict(self, node: Node) -> None:
        """Receive a node whose keys and values are being deleted."""

    def on_reset(self) -> None:
        """Forget all nodes, which are being deleted."""


class PrefixTree:
    """Sequences that share prefixes, each stored once in a pool.

    An `owner` is a request of several that use the tree at the same time; without one, a method means all nodes.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.observer = RequestObserver()
        self.clock = 0
        self.state_interval: int | None = None  # most tokens of a new node, so that states are kept between
        self.clear()

    def clear(self) -> None:
        """Delete all nodes, but not their blocks."""
        self.root = Node(np.empty(0, np.int64))
        self.roots = {self.root.identity: self.root}
        self.pins: dict[Node, set[Owner]] = {}  # owners that use a node, by node
        self.leaves: dict[Owner, list[Node]] = {}  # nodes at which the rows of an owner begin or end, by owner
        self.computing: dict[Node, Owner] = {}  # the owner that computes the uncached tokens of a node
        self._unquantized: dict[Node, None] = {}  # with blocks to be rounded to 8 bits, in order; with `cache_dtype`
        self.observer.on_reset()

    # Nodes

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of all identities except the roots, parents before children."""
        stack = [child for root in self.roots.values() for child in root.all_children()][::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.all_children()[::-1])

    def insert(self, tokens: np.ndarray, root: Node, gap: int = 0) -> Node:
        """Insert tokens, int64 `[length]`, after `root`. Return the last token's node.

        Reuses nodes of the tree, splits them where necessary, and creates the rest. `gap`: see `Node`.
        """
        node = root
        first_gap = gap
        for part in self.parts(tokens):
            left = part
            while len(left):
                child, shared = self._best_child(node, left, first_gap)
                if child is None:
                    shared = min(self._fork(node, left, first_gap), self.state_interval or len(left))
                    node = self.add(node, left[:shared])
                    node.gap = first_gap
                elif shared < len(child.tokens):
                    node = self._split(child, shared)
                else:
                    node = child
                node.last_used = self.clock
                first_gap = 0
                left = left[shared:]
        return node

    def add(self, parent: Node, tokens: np.ndarray, block: Block | None = None) -> Node:
        """Append a node to `parent`, without a search for shared prefixes.

        `block` holds the keys and values of a finished completion; tokens beyond its length are dropped.
        """
        if block is not None:
            tokens = tokens[: block.length]
        node = Node(np.asarray(tokens, np.int64), parent, block, last_used=self.clock)
        node.shift = self.pool.images.shift(node.tokens)
        if self.pool.arena.quantized is not None:
            self._unquantized[node] = None
        parent.children.setdefault(int(node.tokens[0]), []).append(node)
        return node

    def matching(self, tokens: np.ndarray, root: Node, gap: int = 0) -> list[Node]:
        """Return the nodes that `insert` would use or split, from the one after `root` on."""
        path: list[Node] = []
        node = root
        for part in self.parts(tokens):
            left = part
            while len(left):
                child, shared = self._best_child(node, left, gap)
                if child is None:
                    return path
                path.append(child)
                if shared < len(child.tokens):
                    return path
                node = child
                gap = 0
                left = left[shared:]
        return path

    def parts(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of a prompt in the parts at whose ends a node ends, each int64 `[length]`.

        `insert` and `matching` both read a prompt in these parts, so that a request waits for all nodes that it uses.
        Where layers keep states, the last token is a part: it is computed again for its logits, which needs the state
        before it.
        """
        images = self.pool.images
        if not self.pool.states.in_use:
            return list(images.split(tokens))
        return [*images.split(tokens[:-1]), *images.split(tokens[-1:])]

    def cached_child(self, parent: Node, tokens: np.ndarray) -> Node | None:
        """Return the child of a node that holds some tokens, if their keys and values are cached.

        A child that holds more is split.
        """
        child, shared = self._best_child(parent, tokens)
        if child is None or shared < len(tokens) or shared > child.num_cached:
            return None
        return child if shared == len(child.tokens) else self._split(child, shared)

    def retain(self, tokens: np.ndarray) -> None:
        """Keep only the longest cached prefix of `tokens`, int64 `[length]`; remove all other tokens from the tree."""
        node = self.root
        left = tokens
        while True:
            child: Node | None = None
            shared = 0
            if len(left):
                child, shared = self._best_child(node, left)
            if child is not None and shared < len(child.tokens):
                child = self._split(child, shared)
            for other in node.all_children():
                if other is not child:
                    self._remove(other)
            if child is None:
                return
            node = child
            left = left[shared:]

    def nodes_to_prefill(self, owner: Owner | None = None) -> list[Node]:
        """Return nodes with uncached tokens, parents before children, and allocate their blocks."""
        nodes = [node for node in self._nodes_of(owner) if len(node.uncached)]
        for node in nodes:
            if self.pool.arena.quantized is not None:
                self._unquantized[node] = None  # again, if it was evicted
            if node.block is None:
                capacity = len(node.tokens) if owner is None else 0
                assert node.parent is not None, "the root has no tokens"
                node.block = self.pool.new_block(capacity, node.parent.next_position)
                node.block.gap = node.gap
                node.block.shift = node.shift
        return nodes

    def quantize(self) -> None:
        """Round the blocks of complete nodes to 8 bits, as long as there is memory for it."""
        for node in [node for node in self._unquantized if node.num_cached == len(node.tokens)]:
            if not self.pool.quantize(node.block):  # type: ignore[arg-type]
                return
            del self._unquantized[node]

    def discard_uncached(self, owner: Owner | None = None) -> None:
        """Remove uncached tokens from the tree after a failed prefill; with an owner, only tokens of its own."""
        for node in [*self._nodes_of(owner)][::-1]:  # children first
            if len(node.uncached) and (owner is None or self.pins[node] == {owner}):
                self.pins.pop(node, None)
                self.computing.pop(node, None)
                self._trim(node)

    def discard(self, node: Node) -> None:
        """Remove a node and what follows it, and free the blocks."""
        self._remove(node)

    def discard_stateless(self) -> None:
        """Delete keys and values after which no row can continue, as a failed pass has half written their state.

        Where a running owner uses them, the pass has computed their state again: only that is deleted.
        """
        for node in [*self.nodes()][::-1] if self.pool.states.in_use else ():  # children first
            if node.block is None or not node.num_cached or node.block.has_state or node.is_state_dropped:
                continue
            if self.is_used(node):
                self.pool.forget_state(node.block)
            else:
                self.pool.release(node.block)
                if node not in self.pins:
                    self._remove(node)

    def discard_nonfinite(self) -> None:
        """Remove nodes with keys or values that are not finite, as a transient error of the model leaves them.

        Reads the last layer only, which a NaN or infinity in any earlier layer reaches.
        """
        layers = self.pool.arena.layers
        states = self.pool.states
        layer = layers.get(max(layers, default=-1))
        nodes = [node for node in self.nodes() if node.num_cached and not node.is_finite]
        blocks = [node.block for node in nodes if node.block is not None]
        finite = torch.ones(len(nodes), dtype=torch.bool)
        if layer is not None and nodes:
            in_layer = []
            for block in blocks:
                keys, values = layer.read(block.tokens)
                in_layer.append(keys.isfinite().all() & values.isfinite().all())
            finite &= torch.stack(in_layer).cpu()
        with_state = [index for index, block in enumerate(blocks) if block.has_state]
        if with_state:
            finite[with_state] &= states.are_finite([blocks[index].state for index in with_state])
        for node, is_finite in zip(nodes, finite.tolist(), strict=True):
            node.is_finite = is_finite
            if not is_finite and node in node.siblings:
                self._remove(node)
        if not all(node.is_finite for node in nodes):
            self.pool.clear_unused()

    # Owners

    def add_owner(self, owner: Owner) -> Node:
        """Register an owner. Return the root of its identity, which stays until `unpin`."""
        self.leaves.setdefault(owner, [])
        return self.roots.setdefault(owner.identity, Node(np.empty(0, np.int64), identity=owner.identity))

    def pin(self, node: Node, owner: Owner) -> None:
        """Pin a node and its ancestors for an owner."""
        self.leaves.setdefault(owner, []).append(node)
        new = []
        for ancestor in node.path:
            ancestor.last_used = self.clock
            owners = self.pins.setdefault(ancestor, set())
            if owner not in owners:
                owners.add(owner)
                new.append(ancestor)
        if owner.is_request:
            self.observer.on_use(owner, new)

    def unpin(self, owner: Owner, keep: bool = True) -> None:
        """Unpin the nodes of an owner that has ended.

        Remove their uncomputed tokens, and unless `keep`, all that the owner alone used.
        """
        self.stop_computing(owner)
        nodes = list(self.pinned(owner))
        if owner.is_request:
            self.observer.on_end(owner, nodes)
        self.leaves.pop(owner, None)
        for node in nodes:
            self.pins[node].discard(owner)
            if not self.pins[node]:
                del self.pins[node]
        for node in sorted(nodes, key=lambda node: -node.start):  # children first
            if node in self.pins or node not in node.siblings:
                continue
            if keep:
                self._trim(node)
            else:
                self._remove(node)
        root = self.roots.get(owner.identity)
        if root is not None:
            self._forget(root)

    def unpin_nodes(self, nodes: Collection[Node], owner: Owner) -> None:
        """Unpin nodes of an owner, which uses none of their children, and what only led to them."""
        given_up = set(nodes)
        self.leaves[owner] = [leaf for leaf in self.leaves[owner] if leaf not in given_up]
        used = set(self.pinned(owner))
        unused = {
            ancestor for node in given_up for ancestor in node.path
        } - used  # also heads that were split from them
        for node in unused:
            owners = self.pins.get(node, set())
            owners.discard(owner)
            if not owners:
                self.pins.pop(node, None)

    def pinned(self, owner: Owner) -> Iterator[Node]:
        """Yield the nodes that an owner uses, parents before children."""
        paths = dict.fromkeys(node for leaf in self.leaves.get(owner, ()) for node in leaf.path)
        yield from (node for node in paths if owner in self.pins.get(node, ()))

    def is_attached(self, node: Node, root: Node) -> bool:
        """Return whether a node is in the tree, below a root."""
        while node.parent is not None:
            if node not in node.siblings:
                return False
            node = node.parent
        return node is root

    def is_used(self, node: Node, resumed: Collection[Owner] = ()) -> bool:
        """Return whether an owner that is not preempted, or one of `resumed`, uses a node."""
        return any(not owner.preempted or owner in resumed for owner in self.pins.get(node, ()))

    def start_computing(self, nodes: Iterable[Node], owner: Owner) -> None:
        """Register that an owner computes nodes, so that others wait for it."""
        self.computing.update(dict.fromkeys(nodes, owner))

    def stop_computing(self, owner: Owner, but: Collection[Node] = ()) -> None:
        """Register that an owner computes no nodes except `but`."""
        nodes = [node for node, computing in self.computing.items() if computing is owner and node not in but]
        for node in nodes:
            del self.computing[node]

    def is_computed_by_other(self, node: Node, owner: Owner) -> bool:
        """Return whether another owner computes a node, or will continue to, once it is resumed."""
        return len(node.uncached) > 0 and self.computing.get(node, owner) is not owner

    # Eviction

    def evict(self, priority: Callable[[Node], float | tuple[float, ...]]) -> Iterator[tuple[int, int]]:
        """Delete keys and values that no running owner uses, least priority first and children before parents.

        Yields the numbers of tokens and bytes of each node. Nodes that preempted owners will need again stay, empty.
        """
        count = itertools.count()
        queue = [(priority(node), next(count), node) for node in self.nodes() if self._is_evictable(node)]
        heapq.heapify(queue)
        while queue:
            _, _, node = heapq.heappop(queue)
            tokens = node.num_cached
            parent = node.parent
            assert node.block is not None
            size = self.pool.bytes_with_state(node.block)
            assert parent is not None
            self.observer.on_evict(node)
            if self.pins.get(node) or node.all_children():
                self.pool.release(node.block)
            else:
                self._remove(node)
            if self._is_evictable(parent):
                heapq.heappush(queue, (priority(parent), next(count), parent))
            yield tokens, size

    def drop_states(self, kept: Collection[Block]) -> Iterator[None]:
        """Delete states of nodes, the least recently used first, but no keys; yield after each.

        Each belongs to the end of a prompt or a completion, or to a place where prompts fork. No pass needs it before
        a row continues there; it is then computed again. States of `kept`, and those that the next passes of running
        owners continue from, stay.
        """
        needed = set(kept)
        for owner in self.leaves:
            if not owner.preempted:
                needed.update(owner.reads)
        nodes = [node for node in self.nodes() if node.block is not None and node.block.state >= 0]
        for node in sorted(nodes, key=lambda node: node.last_used):
            if node.block is not None and node.block not in needed:
                self.pool.touch()
                self.pool.forget_state(node.block)
                yield

    def first_without_state(self, owner: Owner, blocks: Collection[Block]) -> Node | None:
        """Return the node of an owner whose state is to be computed first, so that those of some blocks are known.

        The state before it is known. Return None if no state is missing.
        """
        for node in self.pinned(owner):
            if node.block in blocks and node.is_state_dropped:
                path = node.path
                while len(path) > 1 and path[-2].is_state_dropped:
                    path.pop()
                return path[-1]
        return None

    def _is_evictable(self, node: Node) -> bool:
        if not node.num_cached or self.is_used(node):
            return False
        return not any(child.num_cached for child in node.all_children())

    def _nodes_of(self, owner: Owner | None) -> Iterator[Node]:
        return self.nodes() if owner is None else self.pinned(owner)

    def _trim(self, node: Node) -> None:
        """Remove the uncached tokens of a node and what follows them, and the node if none is left."""
        if not node.num_cached:
            self._remove(node)
            return
        if len(node.uncached):
            for child in node.all_children():
                self._remove(child)
            node.shift = 0
            node.block.shift = 0  # type: ignore[union-attr]
        node.tokens = node.tokens[: node.num_cached]

    def _remove(self, node: Node) -> None:
        for child in node.all_children():
            self._remove(child)
        if node.block is not None:
            self.pool.free(node.block)
        node.siblings.remove(node)
        self._unquantized.pop(node, None)
        if node.parent is not None and node.parent.parent is None:
            self._forget(node.parent)

    def _forget(self, root: Node) -> None:
        """Delete a root without nodes that no owner uses: identities may be many."""
        if root is self.root or any(root.children.values()):
            return
        if all(owner.identity != root.identity for owner in self.leaves):
            self.roots.pop(root.identity, None)

    def _best_child(self, node: Node, tokens: np.ndarray, gap: int = 0) -> tuple[Node | None, int]:
        """Return the child with the longest common prefix with `tokens`, and the length of that prefix.

        With states, only a child from which a row can continue there: its state at that place is kept, or it is not
        computed yet.
        """
        shared = self._common_prefixes(node, tokens, gap)
        if self.pool.states.in_use:
            shared = [(child, length) for child, length in shared if child.has_state_until(length)]
        return max(shared, key=lambda pair: pair[1], default=(None, 0))

    @staticmethod
    def _common_prefixes(node: Node, tokens: np.ndarray, gap: int) -> list[tuple[Node, int]]:
        children = node.children.get(int(tokens[0]), ())
        return [(child, common_prefix(child.tokens, tokens)) for child in children if child.gap == gap]

    def _fork(self, node: Node, tokens: np.ndarray, gap: int) -> int:
        """Return how many of the tokens that follow a node a new child holds."""
        # It ends where the tokens diverge from another child that keeps no state there: the new child keeps one
        return max((length for _, length in self._common_prefixes(node, tokens, gap)), default=len(tokens))

    def _split(self, node: Node, at: int) -> Node:
        """Split a node in two without copying. The node keeps the tail, as it is the leaf of rows; returns the head."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        first_of_tail = int(node.tokens[at])
        head = Node(node.tokens[:at], parent, children={first_of_tail: [node]}, is_finite=node.is_finite)
        head.gap = node.gap
        node.gap = 0
        node.siblings[node.siblings.index(node)] = head
        if node.block is not None:
            head.block, node.block = self.pool.divide(node.block, at)
        if node in self._unquantized:
            self._unquantized[head] = None
        node.tokens = node.tokens[at:]
        node.parent = head
        if node in self.pins:
            self.pins[head] = set(self.pins[node])
        if node in self.computing:
            self.computing[head] = self.computing[node]
        self.observer.on_split(head, node)
        return head


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens with which two sequences, int64 `[length]` each, begin alike."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
