"""TimeToLive: keeps what an agent used until its tool is expected to return."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hf_parallel.cache.tree import Node
from hf_parallel.engine.policies.agents import AgentPolicy, Call, Member, NodeUses


class TimeToLive(AgentPolicy):
    """Keeps the prefixes of an agent that has called a tool, until the tool is expected to return.

    `expected_tool_duration_ms` of a request's hints says when. Prefixes of agents that wait for no tool, or for much
    longer than expected, are evicted first, the least recently used one before the others; then those whose tool
    returns last.

    Parameters
    ----------
    patience : float
        A prefix is kept for this many times the expected duration.
    max_seconds : float
        Tools that take longer keep nothing.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self, patience: float = 2.0, max_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        for name, value in (("patience", patience), ("max_seconds", max_seconds)):
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        self.patience, self.max_seconds, self.clock = patience, max_seconds, clock
        self._returns: dict[
            Member, tuple[float, float]
        ] = {}  # when its tool returns, and until when that is waited for

    def priority(self, node: Node) -> tuple[float, float]:
        """See `EvictionPolicy.priority`."""
        uses, now = self.uses.get(node), self.clock()
        expected = [self._returns[member] for member in uses.users if member in self._returns] if uses else []
        soonest = min((returns for returns, end in expected if now <= end), default=None)
        return (0.0, node.last_used) if soonest is None else (1.0, -soonest)

    def note_call(self, call: Call, used: Sequence[tuple[Node, NodeUses]]) -> Mapping[Node, int]:
        """See `AgentPolicy.note_call`."""
        now, duration = self.clock(), call.hints.expected_tool_duration_ms
        self._returns.pop(call.member, None)
        if duration is not None and duration / 1000 <= self.max_seconds:
            seconds = duration / 1000
            self._returns[call.member] = now + seconds, now + self.patience * seconds
        if len(self._returns) > len(self._members):
            self._returns = {member: time for member, time in self._returns.items() if now <= time[1]}
        return {}
