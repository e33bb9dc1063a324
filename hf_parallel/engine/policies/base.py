"""EvictionPolicy: the order in which cached prefixes are evicted."""

from __future__ import annotations

from typing import Protocol

from hf_parallel.cache.tree import Node


class EvictionPolicy(Protocol):
    """Order in which cached prefixes are evicted.

    If the policy is also a `RequestObserver`, the engine tells it which requests use which prefixes.
    """

    def priority(self, node: Node) -> float | tuple[float, ...]:
        """Return the priority of a node. The lowest is evicted first, children before their parents."""
        raise NotImplementedError(f"{type(self).__name__} has no priority()")


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the least recently used prefix."""

    def priority(self, node: Node) -> float:
        return node.last_used
