"""ReuseEstimate: how probably the next request of an agent uses a cached node, learned from its earlier requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from hf_parallel.cache.shared_prefix import Node
from hf_parallel.engine.policies.agents import MAX_MEMBERS, Member, NodeUses, Use

AGES = 4
"""Classes of age (`Use.age`); the last one holds all that are older."""
DECAY = 0.9
"""Weight of a request of an agent, relative to its next one."""
PRIOR = [0.5 ** (age + 1) for age in range(AGES)]
"""Probability by age before anything was observed."""


class _Classes:
    """A number for each class of uses: by whether the use was a repeated one, and by age."""

    def __init__(self) -> None:
        self.rows = [[0.0] * AGES, [0.0] * AGES]

    def add(self, use: Use, member: Member, number: float) -> None:
        self.rows[use.is_again][min(use.age(member), AGES - 1)] += number


class _Rates:
    """Fraction of the cached tokens of a class that a request used, averaged over requests."""

    def __init__(self) -> None:
        self._used, self._requests = _Classes(), _Classes()

    def add(self, again: int, age: int, fraction: float) -> None:
        for classes, number in ((self._used, fraction), (self._requests, 1.0)):
            classes.rows[again][age] = DECAY * classes.rows[again][age] + number

    def probability(self, again: int, age: int, prior: float) -> float:
        return (self._used.rows[again][age] + prior) / (self._requests.rows[again][age] + 1)


class ReuseEstimate:
    """Learns, for each agent, the fraction of its cached tokens that its next request uses.

    There is one fraction for each age, and for tokens that the agent has used once and repeatedly: the rules of a role
    come again in each request, documents that were retrieved do not, and a conversation that was summarised does not
    either. An agent with few requests has the fractions of all agents.
    """

    def __init__(self) -> None:
        self._rates: OrderedDict[str, _Rates] = OrderedDict()
        self._of_all = _Rates()
        self._cached: WeakKeyDictionary[Member, _Classes] = WeakKeyDictionary()  # tokens

    def note_call(self, member: Member, used: Sequence[tuple[Node, NodeUses]]) -> None:
        """Learn from a request that has ended; `used` have the earlier uses."""
        cached = self._cached.setdefault(member, _Classes())
        reused, next_cached = _Classes(), _Classes()
        for node, uses in used:
            before = uses.users.get(member)
            if before is not None:
                reused.add(before, member, len(node.tokens))
            next_cached.rows[before is not None][0] += len(node.tokens)
        rates = self._rates.setdefault(member.agent, _Rates())
        self._rates.move_to_end(member.agent)
        if len(self._rates) > MAX_MEMBERS:
            self._rates.popitem(last=False)
        for again in (0, 1):
            for age in range(AGES):
                if (held := cached.rows[again][age]) > 0:
                    hit = min(reused.rows[again][age], held)
                    rates.add(again, age, hit / held)
                    self._of_all.add(again, age, hit / held)
                    next_cached.rows[again][min(age + 1, AGES - 1)] += held - hit
        self._cached[member] = next_cached

    def forget(self, node: Node, member: Member, use: Use) -> None:
        """Note that a node is not cached any more, or not as one that a member uses."""
        if (cached := self._cached.get(member)) is not None:
            cached.add(use, member, -len(node.tokens))

    def probability(self, member: Member, use: Use) -> float:
        """Return the probability that the member's next request uses a node, given its last use."""
        again, age = int(use.is_again), min(use.age(member), AGES - 1)
        prior = self._of_all.probability(again, age, PRIOR[age])
        rates = self._rates.get(member.agent)
        return prior if rates is None else rates.probability(again, age, prior)
