"""Eviction policies of papers that `agents_cache` compares with those of the package."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_parallel.cache.tree import Node
from hf_parallel.engine import ContributionPolicy
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.policies.contribution import Member

MAX_STEPS = 1024
"""Maximum numbers of learned steps and of workflows."""


@dataclass(frozen=True)
class TimedHints(AgentHints):
    """Hints that say when a request begins, and how long the tool takes that its answer calls, if it calls one."""

    begins: float = 0.0  # seconds
    tool_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check nothing: traces are our own."""


class OwnerScore(ContributionPolicy):
    """Evict the prefix whose owner has the lowest score; among equals, the least recently used one (Hive, 7.2).

    The owner is the agent that computed the prefix.
    """

    def priority(self, node: Node) -> tuple[float, float]:
        uses = self.uses.get(node)
        return 0.0 if uses is None else self.scores.of(uses.owner), node.last_used


class StepsToExecution(ContributionPolicy):
    """Evict the prefix whose next user is the most steps away (KVFlow, arXiv:2507.07400).

    Among equals, evict the least recently used one. Steps are distances in the graph of agents from the agent that ran
    last in a workflow. The graph is learned from the latest steps of all workflows. Prefixes of agents that cannot be
    reached are evicted first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._current: dict[str, str] = {}  # agent by workflow
        self._steps: deque[tuple[str, str]] = deque(maxlen=MAX_STEPS)
        self._distances: dict[str, dict[str, int]] = {}  # from an agent to others

    def priority(self, node: Node) -> tuple[float, float]:
        uses = self.uses.get(node)
        users = () if uses is None else uses.users
        return -min(map(self._distance, users), default=math.inf), node.last_used

    def on_end(self, request: Any, nodes: Sequence[Node]) -> None:
        workflow = request.hints.workflow_id
        agent = request.hints.agent_id
        before = self._current.pop(workflow, None)
        self._current[workflow] = agent
        if len(self._current) > MAX_STEPS:
            del self._current[next(iter(self._current))]
        if before is not None:
            self._steps.append((before, agent))
            self._distances.clear()
        super().on_end(request, nodes)

    def _distance(self, member: Member) -> float:
        current = self._current.get(member.workflow)
        if current is None:
            return math.inf
        if current not in self._distances:
            self._distances[current] = self._distances_from(current)
        return self._distances[current].get(member.agent, math.inf)

    def _distances_from(self, agent: str) -> dict[str, int]:
        """Return the steps to each reachable agent; to the agent itself, the length of the shortest cycle."""
        graph: dict[str, set[str]] = {}
        for first, second in self._steps:
            graph.setdefault(first, set()).add(second)
        distances: dict[str, int] = {}
        reached = {agent}
        steps = 0
        while reached:
            steps += 1
            reached = {after for one in reached for after in graph.get(one, ())} - distances.keys()
            distances |= dict.fromkeys(reached, steps)
        return distances


class TimeToLive(ContributionPolicy):
    """Keep the prefixes of an agent that has called a tool until the tool is expected to return.

    Prefixes of agents that wait for no tool, or for more than `patience` times the expected time, are evicted first,
    the least recently used one before the others. The next are those whose tool returns last. Needs `TimedHints`.
    """

    def __init__(self, patience: float = 2.0) -> None:
        super().__init__()
        self.patience = patience
        self._now = 0.0
        self._returns: dict[tuple[str, str], tuple[float, float]] = {}
        """By workflow and agent: when its tool returns, and until when the agent is waited for."""

    def priority(self, node: Node) -> tuple[float, float]:
        uses = self.uses.get(node)
        members = () if uses is None else [(member.workflow, member.agent) for member in uses.users]
        expected = [self._returns[member] for member in members if member in self._returns]
        soonest = min((returns for returns, end in expected if self._now <= end), default=None)
        return (0.0, node.last_used) if soonest is None else (1.0, -soonest)

    def on_use(self, request: Any, nodes: Sequence[Node]) -> None:
        self._now = request.hints.begins
        super().on_use(request, nodes)

    def on_end(self, request: Any, nodes: Sequence[Node]) -> None:
        hints = request.hints
        member = hints.workflow_id, hints.agent_id
        self._returns.pop(member, None)
        if hints.tool_seconds is not None:
            self._returns[member] = self._now + hints.tool_seconds, self._now + self.patience * hints.tool_seconds
        super().on_end(request, nodes)
