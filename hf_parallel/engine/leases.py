"""Leases: prefixes of finished requests that stay cached although no request uses them, so that these can be forked.

A lease ends when it is released, after its time, beyond the limits of its holder, and where memory is short: before any
request is preempted, but after all prefixes without a lease are evicted. What it kept is then cached as any other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.pool import Block
from hf_parallel.cache.tree import Node, PrefixTree


@dataclass(frozen=True)
class LeaseTerms:
    """Limits of the leases of one holder.

    Parameters
    ----------
    ttl : float
        Seconds after which a lease ends, counted from the end of its request or from the last fork.
    max_leases : int
        Maximum number of leases of a holder. If it is exceeded, the least recently used lease ends.
    max_lease_bytes : int, optional
        Maximum bytes of keys, values and states that the leases of a holder keep together; shared prefixes count once.
        Default: only the engine's limit.
    """

    ttl: float = 600.0
    max_leases: int = 32
    max_lease_bytes: int | None = None


@dataclass(eq=False)
class Lease:
    """Keeps the prefixes of one request cached for a holder, such as an API key, by pinning their nodes in the tree.

    A lease begins when its request has finished. The engine's thread changes it.
    """

    holder: Hashable
    terms: LeaseTerms
    identity: Hashable = None
    expires: float = 0.0  # as `time.monotonic` counts
    is_held: bool = False
    is_released: bool = False  # also before it has begun
    preempted: bool = field(default=False, init=False)
    is_request: bool = field(default=False, init=False)
    reads: Collection[Block] = field(default=(), init=False)


class Leases:
    """The leases of an engine, by holder, each least recently used first."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._held: dict[Hashable, dict[Lease, None]] = {}
        self.count = 0
        """Number of leases, which other threads may read."""
        self.num_bytes = 0
        """Bytes of keys, values and states that they keep; what they share counts once."""

    def __iter__(self) -> Iterator[Lease]:
        for leases in self._held.values():
            yield from leases

    def begin(self, lease: Lease, identity: Hashable, leaves: Sequence[Node]) -> None:
        """Keep the paths to nodes, as far as they are cached. The holder's other leases end as far as its terms say."""
        if lease.is_released:
            return
        lease.identity = identity
        root = self._tree.add_owner(lease)
        for leaf in leaves:
            node = leaf
            while node.parent is not None and not (node.num_cached and self._tree.is_attached(node, root)):
                node = node.parent
            if node.parent is not None:
                self._tree.pin(node, lease)
        lease.is_held = True
        lease.expires = time.monotonic() + lease.terms.ttl
        of_holder = self._held.setdefault(lease.holder, {})
        of_holder[lease] = None
        while len(of_holder) > lease.terms.max_leases:
            self.release(next(iter(of_holder)))
        most = lease.terms.max_lease_bytes
        while most is not None and of_holder and self._bytes_of(of_holder) > most:
            self.release(next(iter(of_holder)))
        self._measure()

    def renew(self, lease: Lease) -> None:
        """Let the time of a lease begin again, as its request was forked."""
        if lease.is_held:
            lease.expires = time.monotonic() + lease.terms.ttl
            of_holder = self._held[lease.holder]
            of_holder.pop(lease)
            of_holder[lease] = None

    def release(self, lease: Lease) -> None:
        """End a lease, or prevent that it begins."""
        lease.is_released = True
        if not lease.is_held:
            return
        lease.is_held = False
        of_holder = self._held[lease.holder]
        of_holder.pop(lease)
        if not of_holder:
            del self._held[lease.holder]
        self._tree.unpin(lease)
        self._measure()

    def release_next(self) -> bool:
        """End the least recently used lease of the holder whose leases keep most. Return whether there was one."""
        if not self._held:
            return False
        largest = max(self._held, key=lambda holder: self._bytes_of(self._held[holder]))
        self.release(next(iter(self._held[largest])))
        return True

    def release_all(self) -> None:
        """End all leases."""
        for lease in list(self):
            self.release(lease)

    def expire(self) -> None:
        """End the leases whose time is over."""
        if not self._held:
            return
        now = time.monotonic()
        for lease in [lease for lease in self if lease.expires <= now]:
            self.release(lease)

    def seconds_left(self) -> float | None:
        """Seconds until the next lease expires; None: there is none."""
        if not self._held:
            return None
        earliest = min(lease.expires for lease in self)
        return max(earliest - time.monotonic(), 0.0)

    def clear(self) -> None:
        """Forget all leases, as the tree was cleared."""
        for lease in self:
            lease.is_held = False
        self._held = {}
        self._measure()

    def _measure(self) -> None:
        leases = list(self)
        self.count = len(leases)
        self.num_bytes = self._bytes_of(leases)

    def _bytes_of(self, leases: Collection[Lease]) -> int:
        nodes = {node for lease in leases for node in self._tree.pinned(lease)}
        return sum(self._tree.pool.bytes_with_state(node.block) for node in nodes if node.block is not None)
