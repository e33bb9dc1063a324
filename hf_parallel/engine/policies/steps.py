"""StepsToExecution: evicts what the agents need last (KVFlow, arXiv:2507.07400)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import AgentPolicy, Call, Member, NodeUses

MAX_STEPS = 1024
"""Steps from one agent to the next, and workflows, to remember."""


class StepsToExecution(AgentPolicy):
    """Evicts the prefix whose agents run next after the largest number of steps; among equals, the oldest.

    The steps are the distance, in the graph of agents, from the agent of a workflow that ran last. Of the agents that
    use a prefix, the next one counts. What a workflow's agents cannot reach is evicted first.

    Parameters
    ----------
    graph : mapping of str to sequence of str, optional
        The agents that may run after each agent. Default: learned from the latest 1024 steps of all workflows.
    """

    def __init__(self, graph: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__()
        self.graph = graph
        self._current: dict[str, str] = {}  # agent by workflow
        self._steps: deque[tuple[str, str]] = deque(maxlen=MAX_STEPS)
        self._distances: dict[str, dict[str, int]] = {}  # from an agent to others

    def priority(self, node: Node) -> tuple[float, float]:
        """See `EvictionPolicy.priority`."""
        uses = self.uses.get(node)
        users = () if uses is None else uses.users
        return -min(map(self._distance, users), default=math.inf), node.last_used

    def note_call(self, call: Call, used: Sequence[tuple[Node, NodeUses]]) -> Mapping[Node, int]:
        """See `AgentPolicy.note_call`."""
        workflow, agent = call.member.workflow, call.member.agent
        before = self._current.pop(workflow, None)
        self._current[workflow] = agent
        if len(self._current) > MAX_STEPS:
            del self._current[next(iter(self._current))]
        if before is not None and self.graph is None:
            self._steps.append((before, agent))
            self._distances.clear()
        return {}

    def _distance(self, member: Member) -> float:
        current = self._current.get(member.workflow)
        if current is None:
            return math.inf
        if current not in self._distances:
            self._distances[current] = self._distances_from(current)
        return self._distances[current].get(member.agent, math.inf)

    def _distances_from(self, agent: str) -> dict[str, int]:
        """Return the number of steps to each agent that can be reached; to the agent itself, those of a cycle."""
        after: dict[str, set[str]] = {}
        for first, second in self._steps:
            after.setdefault(first, set()).add(second)
        graph = after if self.graph is None else self.graph
        distances: dict[str, int] = {}
        reached, steps = {agent}, 0
        while reached:
            steps += 1
            reached = {other for one in reached for other in graph.get(one, ())} - distances.keys()
            distances |= dict.fromkeys(reached, steps)
        return distances
