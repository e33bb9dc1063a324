"""StepsToExecution: evicts first what the agents need last (KVFlow, arXiv:2507.07400)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import AgentPolicy, Call, Member, NodeUses

MAX_STEPS = 1024
"""Steps from one agent to the next that are remembered."""


class StepsToExecution(AgentPolicy):
    """Evicts first the prefixes whose agents run next after the largest number of steps; among equals, the oldest.

    The steps are the distance in the graph of agents from the agent of a workflow that runs or ran last. Of the agents
    that use a prefix, the next one counts. What a workflow's agents cannot reach is evicted first.

    Parameters
    ----------
    graph : mapping of str to sequence of str, optional
        For each agent, those that may run after it. Default: learned from the latest 1024 steps of all workflows.
    """

    def __init__(self, graph: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__()
        self.graph = None if graph is None else {agent: list(after) for agent, after in graph.items()}
        self._current: dict[str, str] = {}  # agent by workflow
        self._steps: deque[tuple[str, str]] = deque()
        self._edges: Counter[tuple[str, str]] = Counter()
        self._distances: dict[str, dict[str, int]] = {}  # from an agent to others

    def priority(self, node: Node) -> tuple[float, float]:
        """See `EvictionPolicy.priority`."""
        uses = self.uses.get(node)
        steps = min((self._distance(member) for member in uses.users), default=math.inf) if uses else math.inf
        return -steps, node.last_used

    def note_call(self, call: Call, used: Sequence[tuple[Node, NodeUses]]) -> Mapping[Node, int]:
        """See `AgentPolicy.note_call`."""
        member = call.member
        before = self._current.pop(member.workflow, None)
        self._current[member.workflow] = member.agent
        if len(self._current) > MAX_STEPS:
            del self._current[next(iter(self._current))]
        if before is None or self.graph is not None:
            return {}
        self._steps.append((before, member.agent))
        self._edges[before, member.agent] += 1
        if len(self._steps) > MAX_STEPS:
            gone = self._steps.popleft()
            self._edges[gone] -= 1
            if not self._edges[gone]:
                del self._edges[gone]
        self._distances.clear()
        return {}

    def _distance(self, member: Member) -> float:
        current = self._current.get(member.workflow)
        if current is None:
            return math.inf
        if current not in self._distances:
            self._distances[current] = self._search(current)
        return self._distances[current].get(member.agent, math.inf)

    def _search(self, agent: str) -> dict[str, int]:
        """Return the number of steps from an agent to each that it reaches, to itself only by a cycle."""
        after: Mapping[str, Sequence[str]]
        if self.graph is not None:
            after = self.graph
        else:
            found: dict[str, list[str]] = {}
            for first, second in self._edges:
                found.setdefault(first, []).append(second)
            after = found
        distances: dict[str, int] = {}
        reached, steps = [agent], 0
        while reached:
            steps += 1
            reached = [
                other
                for other in dict.fromkeys(n for one in reached for n in after.get(one, ()))
                if other not in distances
            ]
            distances |= dict.fromkeys(reached, steps)
        return distances
