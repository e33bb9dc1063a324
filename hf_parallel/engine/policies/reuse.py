"""ReuseEstimate: how probably the next request of an agent uses a cached node, learned from its earlier requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import MAX_MEMBERS, Member, NodeUses, Use

COUNTS = 5
"""Classes of `Use.count`: 1, 2 to 3, 4 to 7, 8 to 15, and more."""
AGES = 4
"""Classes of age (`Use.age`); the last one holds all that are older."""
DECAY = 0.9
"""Weight of a request of an agent, relative to its next one."""
MAX_EVICTED = 32
"""Evicted nodes of an agent that are remembered."""
Prefix: TypeAlias = tuple[int, int]
"""Length and hash of the tokens from the root to the end of a node."""
PRIOR = [0.5 ** (age + 1) for age in range(AGES)]
"""Probability by age before anything was observed."""


class _Classes:
    """A number for each class of uses: by their count and age."""

    def __init__(self) -> None:
        self.rows = [[0.0] * AGES for _ in range(COUNTS)]

    def add(self, use: Use, member: Member, number: float) -> None:
        count, age = _class_of(use, member)
        self.rows[count][age] += number


class _Rates:
    """Fraction of the tokens of a class that a request used again, averaged over requests."""

    def __init__(self) -> None:
        self._used, self._requests = _Classes(), _Classes()

    def add(self, count: int, age: int, fraction: float) -> None:
        for classes, number in ((self._used, fraction), (self._requests, 1.0)):
            classes.rows[count][age] = DECAY * classes.rows[count][age] + number

    def probability(self, count: int, age: int, prior: float) -> float:
        return (self._used.rows[count][age] + prior) / (self._requests.rows[count][age] + 1)


def _class_of(use: Use, member: Member) -> tuple[int, int]:
    return _count_class(use.count), min(use.age(member), AGES - 1)


def _count_class(count: int) -> int:
    return min(count.bit_length(), COUNTS) - 1


class ReuseEstimate:
    """Learns, for each agent, the fraction of the tokens of its earlier requests that its next request uses.

    There is one fraction for each number of uses so far and each age: the rules of a role come again in each request,
    the turns of a conversation until it is summarised, and retrieved documents do not. An agent with few requests has
    the fractions of all agents. Nodes that were evicted count, too: else an agent whose tokens are always evicted
    before its next request would never be seen to use them again.
    """

    def __init__(self) -> None:
        self._rates: OrderedDict[str, _Rates] = OrderedDict()
        self._of_all = _Rates()
        self._held: WeakKeyDictionary[Member, _Classes] = WeakKeyDictionary()  # tokens that may be used again
        self._evicted: WeakKeyDictionary[Member, OrderedDict[Prefix, tuple[Use, int]]] = WeakKeyDictionary()
        self._hashes = _PrefixHashes()

    def note_call(self, member: Member, used: Sequence[tuple[Node, NodeUses]]) -> dict[Node, int]:
        """Learn from a request that has ended; see `AgentPolicy.note_call`."""
        held = self._held.setdefault(member, _Classes())
        reused, next_held = _Classes(), _Classes()
        counts = self._find_evicted(member, used, reused)
        for node, uses in used:
            before = uses.users.get(member)
            if before is not None:
                reused.add(before, member, len(node.tokens))
            count = counts.get(node, 0) if before is None else before.count
            next_held.rows[_count_class(count + 1)][0] += len(node.tokens)
        rates = self._rates.setdefault(member.agent, _Rates())
        self._rates.move_to_end(member.agent)
        if len(self._rates) > MAX_MEMBERS:
            self._rates.popitem(last=False)
        for kind in range(COUNTS):
            for age in range(AGES):
                if (tokens := held.rows[kind][age]) > 0:
                    hit = min(reused.rows[kind][age], tokens)
                    rates.add(kind, age, hit / tokens)
                    self._of_all.add(kind, age, hit / tokens)
                    next_held.rows[kind][min(age + 1, AGES - 1)] += tokens - hit
        self._held[member] = next_held
        return counts

    def _find_evicted(self, member: Member, used: Sequence[tuple[Node, NodeUses]], reused: _Classes) -> dict[Node, int]:
        """Add evicted nodes whose tokens a request has used again; return earlier uses of the nodes that hold these."""
        evicted = self._evicted.get(member)
        if not evicted or all(member in uses.users for _, uses in used):
            return {}
        counts = {}
        for node, uses in used:
            if member in uses.users:
                continue
            start, hashes = self._hashes.within(node)
            found = [
                prefix
                for prefix in evicted
                if start < prefix[0] <= start + len(hashes) and hashes[prefix[0] - start - 1] == prefix[1]
            ]
            for prefix in found:
                use, length = evicted.pop(prefix)
                reused.add(use, member, length)
                if 2 * length >= len(node.tokens):
                    counts[node] = use.count
        return counts

    def evict(self, node: Node, uses: NodeUses) -> None:
        """Note that a node is being evicted."""
        start, hashes = self._hashes.within(node)
        prefix = start + len(node.tokens), int(hashes[-1])
        for member, use in uses.users.items():
            evicted = self._evicted.setdefault(member, OrderedDict())
            gone = [evicted.pop(prefix)] if prefix in evicted else []
            evicted[prefix] = use, len(node.tokens)
            if len(evicted) > MAX_EVICTED:
                gone.append(evicted.popitem(last=False)[1])
            for old, length in gone:
                self._forget(member, old, length)

    def forget(self, node: Node, member: Member, use: Use) -> None:
        """Note that a member is not among the users of a node any more."""
        self._forget(member, use, len(node.tokens))

    def _forget(self, member: Member, use: Use, length: int) -> None:
        if (held := self._held.get(member)) is not None:
            held.add(use, member, -length)

    def probability(self, member: Member, use: Use) -> float:
        """Return the probability that the member's next request uses a node, given its last use."""
        count, age = _class_of(use, member)
        prior = self._of_all.probability(count, age, PRIOR[age])
        rates = self._rates.get(member.agent)
        return prior if rates is None else rates.probability(count, age, prior)


class _PrefixHashes:
    """Hashes of all prefixes of a sequence: sums of its tokens times random factors of their positions, modulo 2^64."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng()
        self._factors = np.empty(0, np.uint64)

    def within(self, node: Node) -> tuple[int, np.ndarray]:
        """Return the start of a node, and the hashes of the prefixes that end at each of its tokens."""
        before = [one.tokens for one in node.path[:-1]]
        start = sum(map(len, before))
        tokens = np.concatenate([*before, node.tokens])
        if (missing := len(tokens) - len(self._factors)) > 0:
            more = self._rng.integers(1, 2**64, missing + len(self._factors), np.uint64)
            self._factors = np.concatenate([self._factors, more])
        sums = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._factors[: len(tokens)])
        return start, sums[start:]
