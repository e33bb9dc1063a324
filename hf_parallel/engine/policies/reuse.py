"""ReuseEstimate: probability that an agent's next request uses a cached node, learned from its requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import MAX_MEMBERS, Member, NodeUses, Use

COUNTS = 5
"""Number of classes of `Use.times`: 1, 2 to 3, 4 to 7, 8 to 15, more."""
AGES = 4
"""Number of classes of age, the requests since the last use. The last class is open."""
DECAY = 0.9
"""Decay of the statistics of an agent per request."""
MAX_EVICTED = 32
"""Maximum number of evicted nodes to remember per member."""
PRIOR = 0.5
"""Probability before any observation: this number to the power of the age, counted from 1."""
Prefix: TypeAlias = tuple[int, int]
"""Length and hash of the tokens from the root to the end of a node."""


class ReuseEstimate:
    """Estimate of the fraction of an agent's earlier tokens that its next request reuses.

    Fractions depend on the number of uses and the age: the rules of a role occur in every request, the turns of a
    conversation until it is summarised, and retrieved documents once. An agent with few requests starts from the
    fractions of all agents. Evicted nodes count too. Otherwise, an agent whose tokens are always evicted before its
    next request would never seem to reuse them.
    """

    def __init__(self) -> None:
        # [2, COUNTS, AGES]: sum over requests of the reused fraction, and number of requests
        self._rates: OrderedDict[str, np.ndarray] = OrderedDict()
        self._rates_of_all = np.zeros((2, COUNTS, AGES))
        self._held: WeakKeyDictionary[Member, np.ndarray] = WeakKeyDictionary()  # reusable tokens [COUNTS, AGES]
        self._evicted: WeakKeyDictionary[Member, OrderedDict[Prefix, tuple[Use, int]]] = WeakKeyDictionary()

    def note_call(self, member: Member, used: Sequence[tuple[Node, NodeUses]]) -> dict[Node, int]:
        """Learn from a finished request; see `AgentPolicy.note_call`."""
        held = self._held.get(member, np.zeros((COUNTS, AGES)))
        reused, next_held = np.zeros_like(held), np.zeros_like(held)
        counts = self._find_evicted(member, used, reused)
        for node, uses in used:
            before = uses.users.get(member)
            if before is not None:
                reused[_class_of(before, member)] += len(node.tokens)
            count = counts.get(node, 0) if before is None else before.times
            next_held[_count_class(count + 1), 0] += len(node.tokens)
        seen = held > 0
        hits = np.minimum(reused, held)
        rates = self._rates.setdefault(member.agent, np.zeros_like(self._rates_of_all))
        self._rates.move_to_end(member.agent)
        if len(self._rates) > MAX_MEMBERS:
            self._rates.popitem(last=False)
        for sums in (rates, self._rates_of_all):
            sums[:, seen] *= DECAY
            sums[0, seen] += hits[seen] / held[seen]
            sums[1, seen] += 1
        left = np.where(seen, held - hits, 0)
        next_held[:, 1:] += left[:, :-1]
        next_held[:, -1] += left[:, -1]
        self._held[member] = next_held
        return counts

    def _find_evicted(
        self, member: Member, used: Sequence[tuple[Node, NodeUses]], reused: np.ndarray
    ) -> dict[Node, int]:
        """Count reused tokens that were evicted; return the earlier uses of the nodes that hold them now."""
        evicted = self._evicted.get(member, OrderedDict())
        counts: dict[Node, int] = {}
        for node, uses in used:
            if not evicted or member in uses.users:
                continue
            tokens = _prefix(node)
            start = len(tokens) - len(node.tokens)
            inside = [prefix for prefix in evicted if start < prefix[0] <= len(tokens)]
            for prefix in inside:
                if _hash(tokens[: prefix[0]]) == prefix[1]:
                    use, length = evicted.pop(prefix)
                    reused[_class_of(use, member)] += length
                    if 2 * length >= len(node.tokens):
                        counts[node] = use.times
        return counts

    def evict(self, node: Node, uses: NodeUses) -> None:
        """Remember the uses of a node before its eviction."""
        tokens = _prefix(node)
        prefix = len(tokens), _hash(tokens)
        for member, use in uses.users.items():
            evicted = self._evicted.setdefault(member, OrderedDict())
            gone = [evicted.pop(prefix)] if prefix in evicted else []
            evicted[prefix] = use, len(node.tokens)
            if len(evicted) > MAX_EVICTED:
                gone.append(evicted.popitem(last=False)[1])
            for old, length in gone:
                self.forget(member, old, length)

    def forget(self, member: Member, use: Use, length: int) -> None:
        """Remove tokens from a member's reusable ones."""
        if (held := self._held.get(member)) is not None:
            held[_class_of(use, member)] -= length

    def probability(self, member: Member, use: Use) -> float:
        """Return the probability that a member's next request uses a node, given its last use."""
        place = _class_of(use, member)
        found = PRIOR ** (place[1] + 1)
        for sums in (self._rates_of_all, self._rates.get(member.agent)):
            if sums is not None:
                found = (sums[0][place] + found) / (sums[1][place] + 1)
        return found


def _class_of(use: Use, member: Member) -> tuple[int, int]:
    return _count_class(use.times), min(max(0, member.calls - use.calls - 1), AGES - 1)


def _count_class(count: int) -> int:
    return min(count.bit_length(), COUNTS) - 1


def _prefix(node: Node) -> np.ndarray:
    """Return the tokens from the root to the end of a node."""
    return np.concatenate([one.tokens for one in node.path])


def _hash(tokens: np.ndarray) -> int:
    return hash(tokens.tobytes())
