"""ContributionPolicy: keep prefixes that agents with a high contribution will probably reuse (Hive, section 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import AgentPolicy, Call, Member, NodeUses
from hf_parallel.engine.policies.reuse import ReuseEstimate
from hf_parallel.engine.policies.scores import ContributionScores

DEFAULT_INTERVAL = 16.0
"""Assumed turns between two requests of an agent that has sent only one."""
PATIENCE = 4.0
"""A silent agent counts less and less after this many of its usual intervals."""


class ContributionPolicy(AgentPolicy):
    """Evict the prefix of the lowest contribution: the scores of its users times their expected reuse.

    The paper evicts prefixes of the agent with the lowest score. But a score is one number for everything that an agent
    has computed, and an important agent also leaves prefixes that it never uses again, such as turns before a summary.
    Here, the priority of a prefix is the sum, over its users, of the agent's score times the probability that its next
    request uses the prefix (`ReuseEstimate`). An agent that is silent for much longer than usual counts less. Among
    equal priorities, the least recently used prefix is evicted.

    Parameters
    ----------
    alpha, window, round_turns
        See `ContributionScores`.

    Examples
    --------
    >>> policy = ContributionPolicy()
    >>> with Engine(model, tokenizer, max_kv_bytes=2**30, policy=policy) as engine:
    ...     engine.submit(prompt, agent_hints={"workflow_id": "1", "agent_id": "Patcher"}).result()
    >>> policy.scores.current["Patcher"].score
    """

    def __init__(self, alpha: float = 0.4, window: int = 8, round_turns: int = 16) -> None:
        super().__init__()
        self.scores = ContributionScores(alpha, window, round_turns)
        """Current and earlier scores of the agents."""
        self._reuse = ReuseEstimate()

    def priority(self, node: Node) -> tuple[float, float]:
        """See `EvictionPolicy.priority`."""
        uses = self.uses.get(node)
        expected = 0.0
        for member, use in uses.users.items() if uses is not None else ():
            expected += self._score(member.agent) * self._reuse.probability(member, use) * self._presence(member)
        return expected, node.last_used

    def note_call(self, call: Call, used: Sequence[tuple[Node, NodeUses]]) -> Mapping[Node, int]:
        """See `AgentPolicy.note_call`."""
        self.scores.add(call)
        return self._reuse.note_call(call.member, used)

    def forget(self, node: Node, member: Member) -> None:
        """See `AgentPolicy.forget`."""
        self._reuse.forget(member, self.uses[node].users[member], len(node.tokens))
        super().forget(node, member)

    def on_evict(self, node: Node) -> None:
        """See `RequestObserver.on_evict`."""
        if (uses := self.uses.pop(node, None)) is not None:
            self._reuse.evict(node, uses)

    def on_reset(self) -> None:
        """See `RequestObserver.on_reset`."""
        super().on_reset()
        self._reuse = ReuseEstimate()

    def _score(self, agent: str) -> float:
        found = self.scores.current.get(agent)
        return self.scores.neutral if found is None else found.score

    def _presence(self, member: Member) -> float:
        usual = PATIENCE * (DEFAULT_INTERVAL if member.interval is None else member.interval)
        return min(1.0, usual / max(self.turn - member.last_turn, 1))
