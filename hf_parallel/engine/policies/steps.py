"""StepsToExecution: evict prefixes of the agents that run last (KVFlow, arXiv:2507.07400)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.base import AgentPolicy, Call, Member

MAX_STEPS = 1024
"""Maximum numbers of learned steps and of workflows."""


class StepsToExecution(AgentPolicy):
    """Evict the prefix whose next user is the most steps away; among equals, the least recently used one.

    Steps are distances in the graph of agents from the agent that ran last in a workflow. Prefixes of agents that
    cannot be reached are evicted first.

    Parameters
    ----------
    graph : mapping of str to sequence of str, optional
        Agents that may run after each agent. Default: learned from the latest 1024 steps of all workflows.
    """

    def __init__(self, graph: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__()
        self.graph = graph
        self._current: dict[str, str] = {}  # agent by workflow
        self._steps: deque[tuple[str, str]] = deque(maxlen=MAX_STEPS)
        self._distances: dict[str, dict[str, int]] = {}  # from an agent to others

    def priority(self, node: Node) -> tuple[float, float]:
        return -min(map(self._distance, self.users_of(node)), default=math.inf), node.last_used

    def on_call(self, call: Call) -> None:
        workflow, agent = call.member.workflow, call.member.agent
        before = self._current.pop(workflow, None)
        self._current[workflow] = agent
        if len(self._current) > MAX_STEPS:
            del self._current[next(iter(self._current))]
        if before is not None and self.graph is None:
            self._steps.append((before, agent))
            self._distances.clear()

    def _distance(self, member: Member) -> float:
        current = self._current.get(member.workflow)
        if current is None:
            return math.inf
        if current not in self._distances:
            self._distances[current] = self._distances_from(current)
        return self._distances[current].get(member.agent, math.inf)

    def _distances_from(self, agent: str) -> dict[str, int]:
        """Return the steps to each reachable agent; to the agent itself, the length of the shortest cycle."""
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
