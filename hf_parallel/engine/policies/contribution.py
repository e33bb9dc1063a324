"""ContributionPolicy: keep prefixes that agents with a high contribution will probably reuse (Hive, section 7)."""

from __future__ import annotations

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import AgentPolicy, Call
from hf_parallel.engine.policies.scores import ContributionScores

PATIENCE = 64
"""Turns of other agents after which a silent agent counts less and less."""


class ContributionPolicy(AgentPolicy):
    """Evict the prefix of the lowest contribution: the scores of its users times their expected reuse.

    The paper evicts prefixes of the agent with the lowest score. But a score is one number for everything that an agent
    has computed, and an important agent also leaves prefixes that it never uses again, such as turns before a summary.
    Here, a user's score counts `(1 - 0.5 ** uses) * 0.5 ** age`, where `age` are its requests since its last use of the
    prefix. An agent that is silent for long counts less. Among equals, the least recently used prefix is evicted.

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

    def priority(self, node: Node) -> tuple[float, float]:
        expected = 0.0
        for member, use in self.users_of(node).items():
            age = max(member.calls - use.calls - 1, 0)
            presence = min(1.0, PATIENCE / max(self.turn - member.last_turn, 1))
            expected += self.scores.of(member.agent) * (1 - 0.5**use.times) * 0.5**age * presence
        return expected, node.last_used

    def on_call(self, call: Call) -> None:
        self.scores.add(call)
