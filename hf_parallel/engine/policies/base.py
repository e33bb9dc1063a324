"""EvictionPolicy: the order in which cached prefixes are evicted. AgentPolicy: base of policies that evict by agent."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from hf_parallel.cache.tree import Node, RequestObserver

MAX_MEMBERS = 4096
"""Maximum number of members; the least recently active ones are forgotten."""
MAX_USERS = 64
"""Maximum number of users of a node; the least recent ones are forgotten."""


class EvictionPolicy(Protocol):
    """Order in which cached prefixes are evicted.

    If the policy is also a `RequestObserver`, the engine tells it which requests use which prefixes.
    """

    @abstractmethod
    def priority(self, node: Node) -> float | tuple[float, ...]:
        """Return the priority of a node. The lowest is evicted first, children before their parents."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the least recently used prefix."""

    def priority(self, node: Node) -> float:
        return node.last_used


@dataclass(eq=False)
class Member:
    """An agent in one run of a workflow."""

    workflow: str
    agent: str
    calls: int = 0  # finished requests
    last_turn: int = 0  # turn of the last request


class Use(NamedTuple):
    """Last use of a node by a member: the member's finished requests before it, and its uses so far."""

    calls: int
    times: int


@dataclass(eq=False)
class NodeUses:
    """The agent that computed a node, and its users, the most recent last."""

    owner: str
    users: dict[Member, Use] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """A request of an agent. `concurrency`: the agent's running requests when it began, itself included."""

    member: Member
    concurrency: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    reused: Counter[str] = field(default_factory=Counter)  # cached tokens by the agent that computed them


class AgentPolicy(RequestObserver, EvictionPolicy):
    """Base of policies that evict by agent. Requests without hints belong to an agent with an empty name."""

    def __init__(self) -> None:
        self.turn = 0  # consecutive requests of one agent are one turn, so no agent can advance the clock alone
        self.uses: WeakKeyDictionary[Node, NodeUses] = WeakKeyDictionary()
        self.running: Counter[str] = Counter()  # requests by agent
        self._members: OrderedDict[tuple[str, str], Member] = OrderedDict()
        self._calls: dict[Any, Call] = {}
        self._last: Member | None = None

    def users_of(self, node: Node) -> dict[Member, Use]:
        """Return the members that have used a node."""
        uses = self.uses.get(node)
        return {} if uses is None else uses.users

    def on_call(self, call: Call) -> None:
        """Receive a finished request."""

    def on_use(self, request: Any, nodes: Sequence[Node]) -> None:
        call = self._calls.get(request) or self._begin(request)
        for node in nodes:
            uses = self.uses.get(node)
            if uses is None:  # a new node, of the prompt or of a completion
                self.uses[node] = NodeUses(call.member.agent)
                call.prompt_tokens += 0 if node.num_cached else len(node.tokens)
                continue
            call.prompt_tokens += len(node.tokens)
            if node.num_cached:
                call.reused[uses.owner] += node.num_cached
            else:
                uses.owner = call.member.agent

    def on_end(self, request: Any, nodes: Sequence[Node]) -> None:
        call = self._calls.pop(request, None)
        if call is None:
            return
        member, call.new_tokens = call.member, request.num_tokens
        self.running -= Counter([member.agent])
        if member is not self._last:
            self.turn, self._last = self.turn + 1, member
        member.last_turn = self.turn
        self.on_call(call)
        for uses in [self.uses[node] for node in nodes if node in self.uses]:
            before = uses.users.pop(member, None)
            uses.users[member] = Use(member.calls, 1 if before is None else before.times + 1)
            if len(uses.users) > MAX_USERS:
                del uses.users[next(iter(uses.users))]
        member.calls += 1

    def on_split(self, head: Node, tail: Node) -> None:
        if (uses := self.uses.get(tail)) is not None:
            self.uses[head] = NodeUses(uses.owner, dict(uses.users))

    def on_evict(self, node: Node) -> None:
        self.uses.pop(node, None)

    def on_reset(self) -> None:
        self.uses.clear()

    def _begin(self, request: Any) -> Call:
        key = request.hints.workflow_id, request.hints.agent_id
        member = self._members.setdefault(key, Member(*key))
        self._members.move_to_end(key)
        if len(self._members) > MAX_MEMBERS:
            self._members.popitem(last=False)
        self.running[member.agent] += 1
        call = self._calls[request] = Call(member, self.running[member.agent])
        return call
