"""EvictionPolicy: the order in which cached prefixes are evicted; and observers, which learn what requests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hf_parallel.cache.shared_prefix import Node


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


class RequestObserver:
    """Base of policies that follow requests. The engine's thread calls the methods, which do nothing here.

    A request has `hints` (`AgentHints`) and `num_tokens`, the number of tokens generated so far.
    """

    def on_use(self, request: Any, nodes: Sequence[Node]) -> None:
        """Note that a request begins to use nodes, parents before children. Nodes that it creates are included."""

    def on_end(self, request: Any, nodes: Sequence[Node]) -> None:
        """Note that a request has ended, or starts again; `nodes` are those that it has used."""

    def on_split(self, head: Node, tail: Node) -> None:
        """Note that the first tokens of `tail` are now those of the new node `head`."""

    def on_evict(self, node: Node) -> None:
        """Note that the keys and values of a node are being deleted."""

    def on_reset(self) -> None:
        """Note that all nodes are being deleted."""
