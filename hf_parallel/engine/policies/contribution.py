"""ContributionPolicy: keeps what agents with a high contribution will probably use again (Hive, section 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import AgentPolicy, Call, Member, NodeUses
from hf_parallel.engine.policies.reuse import ReuseEstimate
from hf_parallel.engine.policies.scores import ContributionScores
from hf_parallel.generation.validation import check_choice

ORDERS = ("score_and_reuse", "score", "reuse")
DEFAULT_INTERVAL = 16.0
"""Turns between two requests of an agent that has sent one only."""
PATIENCE = 4.0
"""Number of its usual intervals after which an agent that sends no request is expected to return less and less."""


class ContributionPolicy(AgentPolicy):
    """Evicts first what contributes least: the score of the agents that use a prefix, times the expected reuse.

    The paper evicts the keys and values of the agent with the lowest score first. But a score is one number for all
    that an agent has computed, and an important agent leaves much that is never used again, such as turns before a
    summary. With `order="score_and_reuse"`, the priority of a prefix is the sum, over the agents that use it, of the
    agent's score times the probability that its next request uses the prefix (`ReuseEstimate`). An agent that is silent
    for much longer than usual counts less. Equal priorities are ordered by the last use. With `order="score"`, the
    priority is the score of the agent that computed the prefix, as in the paper; the last use decides among equals.

    Parameters
    ----------
    alpha, window, round_turns
        See `ContributionScores`.
    order : str
        "score_and_reuse", "score", or "reuse" (without the scores, which are computed nevertheless).

    Examples
    --------
    >>> policy = ContributionPolicy()
    >>> with Engine(model, tokenizer, max_kv_bytes=2**30, policy=policy) as engine:
    ...     engine.submit(prompt, agent_hints={"workflow_id": "1", "agent_id": "Patcher"}).result()
    >>> policy.scores.current["Patcher"].score
    """

    def __init__(
        self, alpha: float = 0.4, window: int = 8, round_turns: int = 16, order: str = "score_and_reuse"
    ) -> None:
        super().__init__()
        check_choice("order", order, ORDERS)
        self.order = order
        self.scores = ContributionScores(alpha, window, round_turns)
        """Scores of the agents, and their history."""
        self._reuse = ReuseEstimate()

    def priority(self, node: Node) -> tuple[float, float]:
        """See `EvictionPolicy.priority`."""
        uses = self.uses.get(node)
        if uses is None:
            return 0.0, node.last_used
        if self.order == "score":
            return self._score(uses.owner), node.last_used
        expected = 0.0
        for member, use in uses.users.items():
            weight = 1.0 if self.order == "reuse" else self._score(member.agent)
            expected += weight * self._reuse.probability(member, use) * self._presence(member)
        return expected, node.last_used

    def note_call(self, call: Call, used: Sequence[tuple[Node, NodeUses]]) -> Mapping[Node, int]:
        """See `AgentPolicy.note_call`."""
        self.scores.add(call)
        return self._reuse.note_call(call.member, used)

    def forget(self, node: Node, member: Member) -> None:
        """See `AgentPolicy.forget`."""
        self._reuse.forget(node, member, self.uses[node].users[member])
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
