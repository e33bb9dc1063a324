"""KVStorage: keys and values of all requests of an engine in one arena with a budget, and the tree of their prefixes.

Nodes of the tree that no running request uses are evicted when the budget is full.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.cache.arena import Arena, Extent
from hf_parallel.cache.fingerprint import active_adapters
from hf_parallel.cache.layout import Block
from hf_parallel.cache.shared_prefix import Node, SharedPrefixCache
from hf_parallel.engine.policies.base import EvictionPolicy, LeastRecentlyUsed, RequestObserver
from hf_parallel.kernels import RotarySpec

MIN_CAPACITY = 16
"""Least initial capacity of a block in tokens."""


class KVBudgetError(RuntimeError):
    """Raised if keys and values of a request do not fit into `max_kv_bytes`."""


class WeightsChangedError(RuntimeError):
    """Raised by a request during which the weights, adapters or dtype of the model changed."""


class BoundedArena(Arena):
    """An arena of at most `max_slots` slots (None: no limit)."""

    max_slots: int | None = None

    @property
    def free_slots(self) -> int:
        """Number of slots that are not allocated, contiguous or not."""
        assert self.max_slots is not None
        return self.max_slots - self.num_slots + sum(size for _, size in self._free)

    def fits(self, size: int) -> bool:
        """Return whether `size` contiguous slots are free."""
        return self.max_slots is None or size <= self.max_slots - self.num_slots or self._has_hole(size)

    def _has_hole(self, size: int) -> bool:
        return any(free >= size for _, free in self._free)

    def _allocate_slots(self, size: int) -> int:
        if not self.fits(size):
            raise KVBudgetError(f"no {size} contiguous slots are free")
        return super()._allocate_slots(size)

    def _storage_slots(self, held: int) -> int:
        grown = super()._storage_slots(held)
        return grown if self.max_slots is None else max(self.num_slots, min(grown, self.max_slots))

    def pack(self, sources: Sequence[tuple[Extent, int, int]], capacities: Sequence[int]) -> list[Extent]:
        """Move all tokens, given as (extent, start, length), to new extents from slot 0 on; drop all others."""
        ranges = [extent.range(start, length) for extent, start, length in sources]
        self.num_slots, self._free = 0, []
        extents = [self.allocate(capacity)[0] for capacity in capacities]
        self.grow()
        self._copy_all(ranges, [e.range(0, r.length) for e, r in zip(extents, ranges, strict=True)])
        return extents


class KVStorage(SharedPrefixCache):
    """Blocks of all requests and the tree of prefixes.

    `max_bytes` bounds the storage of keys and values. `free_memory` is called if it is full and evicting did not
    suffice: it preempts a request and returns True, or returns False if there is none.
    """

    max_tokens: int | None = None
    """Number of tokens that fit into the budget."""

    def __init__(
        self,
        rotary: Mapping[int, RotarySpec | None] | None,
        device: torch.device,
        max_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        free_memory: Callable[[], bool] = lambda: False,
    ) -> None:
        self.policy, self.free_memory = LeastRecentlyUsed() if policy is None else policy, free_memory
        if not callable(getattr(self.policy, "priority", None)):
            raise ValueError(f"policy must have a method priority(node), got {type(policy).__name__}")
        self._observer = self.policy if isinstance(self.policy, RequestObserver) else RequestObserver()
        super().__init__(rotary, device, max_bytes)
        self.clock = 0  # number of steps of the engine
        self.evicted_tokens = 0
        self.pins: dict[Node, set[Any]] = {}  # requests that use a node, by node
        self._leaves: dict[Any, list[Node]] = {}  # nodes at which the rows of a request begin or end, by request
        self.computing: dict[Node, Any] = {}  # the request that computes the uncached tokens of a node
        self._checked = -1  # step in which the weights were checked, and no pass has run since
        self._versions: list[Any] = []  # see `_versions`, at the last check of all weights

    def reset(self) -> None:
        """Delete everything and release all memory."""
        super().reset()
        self._observer.on_reset()
        self.arena = BoundedArena()
        self.arena.max_slots = self.max_tokens
        self.pins, self.computing, self._leaves = {}, {}, {}
        self._checked, self._versions = -1, []

    def check_weights(self, model: PreTrainedModel, ending: Any = None) -> None:
        """Raise `WeightsChangedError` if the weights of the model are or were others since the last check.

        Reads all weights if requests begin, or if the request that is `ending` is the last one. While others run, it
        compares only what PyTorch counts: a write through `Tensor.data` is noticed by the next check of all weights.
        Requests that begin or end in the same step, between two passes, share one check.
        """
        if self._checked == self.clock:
            return
        is_equal = not self.blocks or _versions(model) == self._versions
        try:
            if is_equal and (ending is None or not self._leaves.keys() - {ending}):
                self.claim(model)
                self._checked = self.clock
        except ValueError:
            is_equal = False
        if not is_equal:
            raise WeightsChangedError("the model's weights changed while the request ran")

    def claim(
        self, model: PreTrainedModel, user: Any = None, kept: bool = True, fingerprint: str | None = None
    ) -> None:
        """See `SharedPrefixCache.claim`."""
        versions = _versions(model)  # before the values are read: a change meanwhile is noticed
        super().claim(model, user, kept, fingerprint)
        self._versions = versions

    def commit(self) -> None:
        """See `BlockCache.commit`."""
        super().commit()
        self._checked = -1

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model as of the last check of all weights."""
        assert self._filled_by is not None, "the engine claims the storage when it opens"
        return self._filled_by[0]

    def set_token_size(self, bytes_per_token: int) -> None:
        """Apply the budget, given the bytes of one token over all layers."""
        if self.max_bytes is not None:
            if self.max_bytes < bytes_per_token:
                raise ValueError(f"max_kv_bytes={self.max_bytes} is less than one token needs: {bytes_per_token} bytes")
            self.max_tokens = self._bounded.max_slots = self.max_bytes // bytes_per_token

    @property
    def _bounded(self) -> BoundedArena:
        assert isinstance(self.arena, BoundedArena)
        return self.arena

    # Memory

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """See `BlockCache.reserve`. Evicts, packs and preempts as far as necessary; raises `KVBudgetError`."""
        while growing := [(block, length) for block, length in wanted if self._outgrows(block, length)]:
            sizes = [max(2 * block.extent.capacity, length, MIN_CAPACITY) for block, length in growing]
            if self._bounded.fits(sum(sizes)):
                self._grow_blocks(growing, sizes)
            elif not (self._pack(wanted) or self.evict(sum(sizes) - self._bounded.free_slots) or self.free_memory()):
                held = sum(block.length for block in self.blocks)
                missing = sum(length - block.length for block, length in wanted)
                raise KVBudgetError(
                    f"max_kv_bytes={self.max_bytes} holds {self.max_tokens} tokens: {held} are in use, and {missing} "
                    "more are needed"
                )

    def _grow_blocks(self, growing: Sequence[tuple[Block, int]], sizes: Sequence[int]) -> None:
        groups: dict[int, list[tuple[Block, int]]] = {}
        for (block, _), size in zip(growing, sizes, strict=True):
            groups.setdefault(size, []).append((block, size))
        for size, group in groups.items():
            runs = [(block.extent, block.first, block.length) for block, _ in group]
            for (block, _), extent in zip(group, self.arena.relocate(runs, size), strict=True):
                block.extent, block.first = extent, 0

    @staticmethod
    def _outgrows(block: Block, length: int) -> bool:
        shared = block.extent.owners > 1 and length > block.length
        return block.first + length > block.extent.capacity or shared

    def _pack(self, wanted: Sequence[tuple[Block, int]]) -> bool:
        """Remove all holes and unused capacity, and reserve the wanted lengths; return whether they fit."""
        lengths = dict(wanted)
        held = sorted((block for block in self.blocks if block.length), key=lambda b: (b.extent.origin, b.first))
        blocks = [*held, *(block for block in lengths if not block.length)]
        needed = sum(lengths.get(block, block.length) for block in blocks)
        limit = self._bounded.max_slots
        if limit is None or needed > limit:
            return False
        slack = min(MIN_CAPACITY, (limit - needed) // len(lengths))
        capacities = [lengths[block] + slack if block in lengths else block.length for block in blocks]
        runs = [(block.extent, block.first, block.length) for block in blocks]
        self._last = None
        for block in self.blocks:
            if not block.length:
                block.extent, block.first = Extent(0, 0), 0
        for block, extent in zip(blocks, self._bounded.pack(runs, capacities), strict=True):
            block.extent, block.first = extent, 0
        return True

    def evict(self, slots: int) -> bool:
        """Evict unused nodes, leaves first, until `slots` more are free. Return whether a node was evicted."""
        target, count = self._bounded.free_slots + slots, itertools.count()
        queue = [(self.policy.priority(node), next(count), node) for node in self.nodes() if self._is_evictable(node)]
        if not queue:
            return False
        heapq.heapify(queue)
        while queue and self._bounded.free_slots < target:
            _, _, node = heapq.heappop(queue)
            self._drop(node)
            parent = node.parent
            if parent is not None and self._is_evictable(parent):
                heapq.heappush(queue, (self.policy.priority(parent), next(count), parent))
        return True

    def _is_evictable(self, node: Node) -> bool:
        return _is_cached(node) and not self.is_used(node) and not any(map(_is_cached, node.all_children()))

    def _evict(self) -> None:
        """Do nothing: nodes are evicted where memory is needed."""

    def is_used(self, node: Node) -> bool:
        """Return whether a request that is not preempted uses a node."""
        return any(not request.preempted for request in self.pins.get(node, ()))

    def used_tokens(self, resumed: Collection[Any] = ()) -> int:
        """Return the number of cached tokens of the tree that running requests use, or preempted ones of `resumed`."""
        return sum(
            cached_length(node)
            for node, requests in self.pins.items()
            if any(not request.preempted or request in resumed for request in requests)
        )

    @property
    def uncached_tokens(self) -> int:
        """Number of tokens of the tree whose keys and values will be computed."""
        return sum(len(node.uncached) for node in self.pins)

    def _drop(self, node: Node) -> None:
        """Delete the keys and values of a node; the node itself too, unless a preempted request will need it again."""
        assert node.block is not None
        self._observer.on_evict(node)
        self.evicted_tokens += node.block.length
        if self.pins.get(node) or node.all_children():
            self.release(node.block)
        else:
            self._remove(node)

    def release(self, block: Block) -> None:
        """Free the memory of a block, which stays a block of the cache and is empty."""
        self._last = None
        if block.extent.capacity:
            self.arena.release(block.extent)
        block.extent, block.first, block.length = Extent(0, 0), 0, 0

    def _remove(self, node: Node) -> None:
        super()._remove(node)
        if node.parent is not None and node.parent.parent is None:
            self._forget(node.parent)

    def _forget(self, root: Node) -> None:
        """Delete a root without nodes that no request uses: identities may be many."""
        is_used = any(root.children.values()) or any(request.identity == root.identity for request in self._leaves)
        if root is not self.root and not is_used:
            self.roots.pop(root.identity, None)

    # Requests

    def add_request(self, request: Any) -> Node:
        """Note that a request runs. Return the root of its identity, which stays until `unpin`."""
        self._leaves.setdefault(request, [])
        if request.identity not in self.roots:
            self.roots[request.identity] = Node(np.empty(0, np.int64), identity=request.identity)
        return self.roots[request.identity]

    def pin(self, node: Node, request: Any) -> None:
        """Note that a request uses a node and those before it."""
        self._leaves.setdefault(request, []).append(node)
        new = []
        for one in node.path:
            one.last_used = self.clock
            requests = self.pins.setdefault(one, set())
            if request not in requests:
                requests.add(request)
                new.append(one)
        self._observer.on_use(request, new)

    def unpin(self, request: Any, keep: bool = True) -> None:
        """Note that a request has ended. Remove its uncomputed tokens, and unless `keep`, all that it alone used."""
        self.stop_computing(request)
        nodes = list(self.pinned(request))
        self._observer.on_end(request, nodes)
        self._leaves.pop(request, None)
        for node in nodes:
            self.pins[node].discard(request)
            if not self.pins[node]:
                del self.pins[node]
        for node in sorted(nodes, key=lambda node: -node.start):  # children first
            if node in self.pins or node not in node.siblings:
                continue
            if keep:
                self.trim(node)
            else:
                self._remove(node)
        if (root := self.roots.get(request.identity)) is not None:
            self._forget(root)

    def trim(self, node: Node) -> None:
        """Remove the uncached tokens of a node, and the node if none is left."""
        if node.block is None or not node.block.length:
            self._remove(node)
        else:
            node.tokens = node.tokens[: node.block.length]

    def start_computing(self, nodes: Iterable[Node], request: Any) -> None:
        """Note that a request computes nodes; others wait for it."""
        self.computing.update(dict.fromkeys(nodes, request))

    def stop_computing(self, request: Any, but: Collection[Node] = ()) -> None:
        """Note that a request does not compute any nodes, except those in `but`."""
        for node in [node for node, other in self.computing.items() if other is request and node not in but]:
            del self.computing[node]

    def pinned(self, request: Any) -> Iterator[Node]:
        """Yield the nodes that a request uses, parents before children."""
        paths = dict.fromkeys(node for leaf in self._leaves.get(request, ()) for node in leaf.path)
        yield from (node for node in paths if request in self.pins.get(node, ()))

    def _split(self, node: Node, at: int) -> Node:
        head = super()._split(node, at)
        if node in self.pins:
            self.pins[head] = set(self.pins[node])
        if node in self.computing:
            self.computing[head] = self.computing[node]
        self._observer.on_split(head, node)
        return head

    def _split_block(self, block: Block, at: int) -> tuple[Block, Block]:
        """Split a block for rows that come later; rows that see it continue to, as its two parts."""
        head = Block(block.extent, block.base, block.first, min(at, block.length), block.gap)
        if block.length > at:
            tail = Block(block.extent, block.base + at, block.first + at, block.length - at)
            block.extent.owners += 1
        else:
            tail = self.new_block(base=block.base + at)
        self.blocks -= {block}
        self.blocks |= {head, tail}
        self._last = None
        block.parts = head, tail
        return head, tail


def _versions(model: PreTrainedModel) -> list[Any]:
    """Return what changes with the weights and costs little: adapters, and id and version counter of each parameter.

    Offloaded parameters are left out: they are replaced at each use. Some rotary embeddings replace buffers, too.
    """
    present = (parameter for parameter in model.parameters() if not parameter.is_meta)
    versions = [(id(parameter), 0 if parameter.is_inference() else parameter._version) for parameter in present]
    return [str(active_adapters(model)), *versions]


def cached_length(node: Node) -> int:
    """Return the number of a node's tokens whose keys and values are in memory."""
    return 0 if node.block is None else node.block.length


def _is_cached(node: Node) -> bool:
    return cached_length(node) > 0


def parts_of(view: Iterable[Block]) -> Iterator[Block]:
    """Yield the blocks of a view; those of a block that was split instead of it."""
    for block in view:
        if block.parts:
            yield from parts_of(block.parts)
        else:
            yield block
