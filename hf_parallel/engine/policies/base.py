"""EvictionPolicy: the order in which cached prefixes are evicted."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

from hf_parallel.cache.tree import Node


class EvictionPolicy(Protocol):
    """Order in which cached prefixes are evicted.

    If the policy is also a `RequestObserver`, the engine tells it which requests use which prefixes.
    """

    @abstractmethod
    def priority(self, node: Node) -> float | tuple[float, ...]:
        """Return the priority of a node. The lowest is evicted first, children before their parents."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the least recently used prefix."""

    def priority(self, node: Node) -> float:
        return node.last_used


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Eviction policy that also decides which requests run first."""

    @abstractmethod
    def contribution(self, request: Any) -> float:
        """Return the contribution of a request, between 0 and 1.

        Among a submitter's requests of equal priority, requests with a higher contribution are admitted first and
        preempted last. `request.hints` names the agent.
        """
