"""AgentPolicy: which agents use which nodes of the tree, for policies that evict by agent."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from hf_parallel.cache.tree import Node, RequestObserver
from hf_parallel.engine.hints import AgentHints

MAX_MEMBERS = 4096
"""Agents of workflows that are remembered; those that are idle the longest are forgotten."""
MAX_USERS = 64
"""Users of a node that are remembered, the latest ones."""


@dataclass(eq=False)
class Member:
    """An agent in one run of a workflow."""

    workflow: str
    agent: str
    calls: int = 0
    """Requests that have ended."""
    last_turn: int = 0
    """Turn of the last request that has ended; see `AgentPolicy.turn`."""
    interval: float | None = None
    """Mean number of turns between two requests, later ones weighted higher."""


@dataclass(frozen=True)
class Use:
    """The last use of a node by a member."""

    calls: int
    """Number of requests that the member had ended before."""
    count: int
    """Number of requests of the member that have used the node."""

    def age(self, member: Member) -> int:
        """Return the number of requests that the member has ended since."""
        return max(0, member.calls - self.calls - 1)


@dataclass(eq=False)
class NodeUses:
    """Agents that use a node."""

    owner: str
    """Agent that computed it."""
    users: dict[Member, Use] = field(default_factory=dict)
    """In the order of their last use."""


@dataclass(eq=False)
class Call:
    """A request of an agent."""

    member: Member
    hints: AgentHints
    concurrency: int
    """Requests of the agent that ran when it began, itself included."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    reused: Counter[str] = field(default_factory=Counter)
    """Tokens whose keys and values were cached, by the agent that computed them."""


class AgentPolicy(RequestObserver):
    """Base of policies that evict by agent: keeps the users of each node.

    Requests without hints belong to an agent with an empty name.
    """

    def __init__(self) -> None:
        self.turn = 0
        """Clock of the agents: consecutive requests of one agent count once, so that it alone cannot advance it."""
        self.uses: WeakKeyDictionary[Node, NodeUses] = WeakKeyDictionary()
        self.running: Counter[str] = Counter()
        """Requests that run, by agent."""
        self._members: OrderedDict[tuple[str, str], Member] = OrderedDict()
        self._calls: dict[Any, Call] = {}
        self._last: Member | None = None

    def on_use(self, request: Any, nodes: Sequence[Node]) -> None:
        """See `RequestObserver.on_use`."""
        call = self._calls.get(request) or self._begin(request)
        agent = call.member.agent
        for node in nodes:
            held = 0 if node.block is None else node.block.length
            uses = self.uses.get(node)
            if uses is None:  # a new one: of the prompt, or a completion
                self.uses[node] = NodeUses(agent)
                call.prompt_tokens += 0 if held else len(node.tokens)
                continue
            call.prompt_tokens += len(node.tokens)
            if held:
                call.reused[uses.owner] += held
            else:
                uses.owner = agent

    def on_end(self, request: Any, nodes: Sequence[Node]) -> None:
        """See `RequestObserver.on_end`."""
        call = self._calls.pop(request, None)
        if call is None:
            return
        member = call.member
        call.new_tokens = request.num_tokens
        self.running[member.agent] -= 1
        if not self.running[member.agent]:
            del self.running[member.agent]
        if member is not self._last:
            self.turn, self._last = self.turn + 1, member
            passed = self.turn - member.last_turn
            if member.calls:
                member.interval = passed if member.interval is None else (member.interval + passed) / 2
        member.last_turn = self.turn
        used = [(node, self.uses[node]) for node in nodes if node in self.uses]
        counts = self.note_call(call, used)
        for node, uses in used:
            before = uses.users.pop(member, None)
            count = counts.get(node, 0) if before is None else before.count
            uses.users[member] = Use(member.calls, count + 1)
            if len(uses.users) > MAX_USERS:
                self.forget(node, next(iter(uses.users)))
        member.calls += 1

    def note_call(self, call: Call, used: Sequence[tuple[Node, NodeUses]]) -> Mapping[Node, int]:
        """Note a request that has ended, and the nodes that it has used, with their earlier uses.

        Return the number of earlier uses of nodes that are new, as they were evicted.
        """
        return {}

    def forget(self, node: Node, member: Member) -> None:
        """Remove a member from the users of a node."""
        del self.uses[node].users[member]

    def on_evict(self, node: Node) -> None:
        """See `RequestObserver.on_evict`."""
        if (uses := self.uses.get(node)) is not None:
            for member in list(uses.users):
                self.forget(node, member)
            del self.uses[node]

    def on_split(self, head: Node, tail: Node) -> None:
        """See `RequestObserver.on_split`."""
        if (uses := self.uses.get(tail)) is not None:
            self.uses[head] = NodeUses(uses.owner, dict(uses.users))

    def on_reset(self) -> None:
        """See `RequestObserver.on_reset`."""
        self.uses.clear()

    def _begin(self, request: Any) -> Call:
        hints = request.hints
        key = hints.workflow_id, hints.agent_id
        member = self._members.get(key)
        if member is None:
            member = self._members[key] = Member(*key)
            while len(self._members) > MAX_MEMBERS:
                self._members.popitem(last=False)
        self._members.move_to_end(key)
        self.running[member.agent] += 1
        call = self._calls[request] = Call(member, hints, self.running[member.agent])
        return call
