"""EvictionPolicy: the order in which cached prefixes are evicted."""

from __future__ import annotations

from typing import Protocol

from hf_parallel.cache.tree import Node


class EvictionPolicy(Protocol):
    """Order in which cached prefixes are evicted.

    A policy that also is a `RequestObserver` learns which requests use which prefixes.
    """

    def priority(self, node: Node) -> float | tuple[float, ...]:
        """Return the priority of a node; nodes with the least are evicted first, after their children."""


class LeastRecentlyUsed:
    """Evicts the prefix whose last use is the longest ago."""

    def priority(self, node: Node) -> float:
        """Return the time of the last use."""
        return node.last_used
