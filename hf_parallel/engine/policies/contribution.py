"""ContributionPolicy: keep prefixes that agents with a high contribution will probably reuse (Hive, section 7).

ContributionScores: contribution of each agent to a workflow (section 7.1, equations 5 to 8).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hf_parallel.cache.tree import Node, RequestObserver
from hf_parallel.engine.policies.base import EvictionPolicy, SchedulingPolicy
from hf_parallel.generation.validation import check_int

MAX_MEMBERS = 4096
"""Maximum number of members; the least recently active ones are forgotten."""
MAX_USERS = 64
"""Maximum number of users of a node; the least recent ones are forgotten."""
MAX_HISTORY = 512
"""Maximum number of rounds in the history."""
PATIENCE = 64
"""Turns of other agents after which a silent agent counts less and less."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Score of an agent and its terms, each between 0 and 1; the median agent of the window has 0.5.

    `activity`: number of requests. `workload`: their prompt and answer tokens. `efficiency`: cached fraction of the
    prompts. `concurrency`: mean of the average and the maximum number of simultaneous requests.
    """

    score: float
    intrinsic: float
    collaborative: float
    activity: float
    workload: float
    efficiency: float
    concurrency: float


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
class AgentRequest:
    """A request of an agent. `concurrency`: the agent's running requests when it began, itself included."""

    member: Member
    concurrency: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    reused: Counter[str] = field(default_factory=Counter)  # cached tokens by the agent that computed them


@dataclass(slots=True)
class _Turn:
    """Consecutive requests of one agent."""

    agent: str
    counts: Counter[str] = field(default_factory=Counter)
    peak: int = 0  # concurrency
    tokens: Counter[str] = field(default_factory=Counter)  # reused, by the agent that computed them
    events: Counter[str] = field(default_factory=Counter)  # requests that reused them


class ContributionScores:
    """Scores of agents over a sliding window.

    The score of agent i is `alpha * U_i + (1 - alpha) * V_i`. `U_i` is the product of activity, workload, efficiency
    and concurrency. `V_i` is the sum of `w_ij + w_ji` over all other agents j, with `w_ij = sqrt(T_ij) ln(1 + R_ij)`:
    T_ij are the tokens computed by i that j reused, and R_ij is the number of such requests of j. Reuse of an agent's
    own tokens counts only for its efficiency.

    The paper does not say how terms are normalized. Here, `x` becomes `x / (x + m)`, where m is the median of the
    positive values. An agent that inflates a count reaches at most 1 and does not lower the values of others, unlike
    with a maximum or a sum. The window counts turns: consecutive requests of an agent are one turn, so a flood of
    requests does not push out other agents' turns.

    Parameters
    ----------
    alpha : float
        Weight of the intrinsic term, between 0 and 1. Below 0.5, sharing counts more, as in the paper.
    window : int
        Number of rounds in the window.
    round_turns : int
        Turns per round. Scores are computed at the end of a round.
    """

    def __init__(self, alpha: float = 0.4, window: int = 8, round_turns: int = 16) -> None:
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        check_int("window", window, at_least=1)
        check_int("round_turns", round_turns, at_least=1)
        self.alpha = alpha
        self.window = window
        self.round_turns = round_turns
        self.current: Mapping[str, Contribution] = {}
        """Scores by agent after the last round."""
        self.history: deque[Mapping[str, Contribution]] = deque(maxlen=MAX_HISTORY)
        """Scores by agent after each of the last rounds, oldest first."""
        self._neutral = 0.5
        self._turns: deque[_Turn] = deque(maxlen=window * round_turns)
        self._since_round = 0  # turns

    def add(self, call: AgentRequest) -> None:
        """Count a finished request; compute the scores if it completes a round."""
        agent = call.member.agent
        if not self._turns or self._turns[-1].agent != agent:
            self._turns.append(_Turn(agent))
            self._since_round += 1
        turn = self._turns[-1]
        turn.counts.update(
            calls=1,
            prompt_tokens=call.prompt_tokens,
            reused_tokens=sum(call.reused.values()),
            new_tokens=call.new_tokens,
            concurrency=call.concurrency,
        )
        turn.peak = max(turn.peak, call.concurrency)
        turn.tokens.update(call.reused)
        turn.events.update(call.reused.keys())
        if self._since_round >= self.round_turns:
            self._since_round = 0
            self.compute()

    def of(self, agent: str) -> float:
        """Return the score of an agent, or the median score if it has joined since the last round."""
        return self.current[agent].score if agent in self.current else self._neutral

    def compute(self) -> None:
        """Compute the scores of all agents in the window."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        peaks: Counter[str] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()  # by owner and user
        events: Counter[tuple[str, str]] = Counter()
        for turn in self._turns:
            totals[turn.agent].update(turn.counts)
            peaks[turn.agent] = max(peaks[turn.agent], turn.peak)
            for owner, number in turn.tokens.items():
                tokens[owner, turn.agent] += number
                events[owner, turn.agent] += turn.events[owner]
        shared: Counter[str] = Counter()
        for (owner, user), number in tokens.items():
            if owner != user:
                weight = math.sqrt(number) * math.log1p(events[owner, user])
                shared.update({owner: weight, user: weight})  # type: ignore[dict-item]
        columns = [
            _normalized([counts["calls"] for counts in totals.values()]),
            _normalized([counts["prompt_tokens"] + counts["new_tokens"] for counts in totals.values()]),
            _normalized([counts["reused_tokens"] / max(counts["prompt_tokens"], 1) for counts in totals.values()]),
            _normalized(
                [(counts["concurrency"] / counts["calls"] + peaks[agent]) / 2 for agent, counts in totals.items()]
            ),
        ]
        intrinsic = _normalized([math.prod(factors) for factors in zip(*columns, strict=True)])
        collaborative = _normalized([shared[agent] for agent in totals])
        current: dict[str, Contribution] = {}
        for agent, alone, together, *factors in zip(totals, intrinsic, collaborative, *columns, strict=True):
            score = self.alpha * alone + (1 - self.alpha) * together
            current[agent] = Contribution(score, alone, together, *factors)
        self.current = current
        self._neutral = median(contribution.score for contribution in current.values())
        self.history.append(self.current)


def _normalized(values: Collection[float]) -> list[float]:
    middle = median([value for value in values if value > 0] or [1.0])
    return [value / (value + middle) for value in values]


class ContributionPolicy(RequestObserver, EvictionPolicy, SchedulingPolicy):
    """Evict the prefix with the lowest contribution: the scores of its users times their expected reuse.

    The paper evicts prefixes of the agent with the lowest score. But an agent has one score for everything that it has
    computed, and even an important agent leaves prefixes that it never uses again, such as turns before a summary.
    Here, the score of each user of a prefix is multiplied by `(1 - 0.5 ** uses) * 0.5 ** age`, where `age` is the
    number of its requests since its last use of the prefix. An agent that is silent for a long time counts less. Among
    equals, the least recently used prefix is evicted.

    Scores also decide which requests of a submitter run first, see `SchedulingPolicy`.
    Requests without hints belong to an agent with an empty name.

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
        self.scores = ContributionScores(alpha, window, round_turns)
        """Current and earlier scores of the agents."""
        self.turn = 0  # consecutive requests of one agent are one turn, so no agent can advance the clock alone
        self.uses: WeakKeyDictionary[Node, NodeUses] = WeakKeyDictionary()
        self.running: Counter[str] = Counter()  # requests by agent
        self._members: OrderedDict[tuple[str, str], Member] = OrderedDict()
        self._calls: dict[Any, AgentRequest] = {}
        self._last: Member | None = None

    def priority(self, node: Node) -> tuple[float, float]:
        uses = self.uses.get(node)
        if uses is None:
            return 0.0, node.last_used
        expected = 0.0
        for member, use in uses.users.items():
            age = max(member.calls - use.calls - 1, 0)
            presence = min(1.0, PATIENCE / max(self.turn - member.last_turn, 1))
            reuse = 1 - 0.5**use.times
            expected += self.scores.of(member.agent) * reuse * 0.5**age * presence
        return expected, node.last_used

    def contribution(self, request: Any) -> float:
        return self.scores.of(request.hints.agent_id)

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
        member = call.member
        call.new_tokens = request.num_tokens
        self.running -= Counter([member.agent])
        if member is not self._last:
            self.turn += 1
            self._last = member
        member.last_turn = self.turn
        self.scores.add(call)
        for node in nodes:
            if node not in self.uses:
                continue
            users = self.uses[node].users
            last_use = users.pop(member, None)
            times = 1 if last_use is None else last_use.times + 1
            users[member] = Use(member.calls, times)
            if len(users) > MAX_USERS:
                del users[next(iter(users))]
        member.calls += 1

    def on_split(self, head: Node, tail: Node) -> None:
        uses = self.uses.get(tail)
        if uses is not None:
            self.uses[head] = NodeUses(uses.owner, dict(uses.users))

    def on_evict(self, node: Node) -> None:
        self.uses.pop(node, None)

    def on_reset(self) -> None:
        self.uses.clear()

    def _begin(self, request: Any) -> AgentRequest:
        key = request.hints.workflow_id, request.hints.agent_id
        member = self._members.setdefault(key, Member(*key))
        self._members.move_to_end(key)
        if len(self._members) > MAX_MEMBERS:
            self._members.popitem(last=False)
        self.running[member.agent] += 1
        call = AgentRequest(member, self.running[member.agent])
        self._calls[request] = call
        return call
