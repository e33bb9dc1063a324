"""ContributionScores: the contribution of each agent to a workflow (Hive, section 7.1, equations 5 to 8)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from hf_parallel.engine.policies.agents import Call

MAX_HISTORY = 512
"""Rounds of the history."""
EPSILON = 1e-6
"""Sums that are less are 0: differences of floats remain."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Score of an agent, and its parts. All are between 0 and 1, and 0.5 for the median agent of the window.

    `activity` is the number of requests, `workload` their tokens of prompt and answer, `efficiency` the part of the
    prompts that was cached, and `concurrency` the mean of average and maximum number of requests at the same time.
    """

    score: float
    intrinsic: float
    collaborative: float
    activity: float
    workload: float
    efficiency: float
    concurrency: float


@dataclass(slots=True)
class _Totals:
    """Counts of an agent in the window, or in one turn."""

    calls: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    concurrency: int = 0  # sum over calls


@dataclass(slots=True)
class _Turn:
    """Consecutive requests of one agent."""

    agent: str
    totals: _Totals = field(default_factory=_Totals)
    peak: int = 0  # concurrency
    shared: dict[str, list[int]] = field(default_factory=dict)  # tokens and events by the agent that computed them


class ContributionScores:
    """Scores of agents over a sliding window.

    The score of agent i is `alpha * U_i + (1 - alpha) * V_i`. `U_i` is the product of activity, workload, efficiency
    and concurrency. `V_i` is the sum of `w_ij + w_ji` over all other agents j, with `w_ij = sqrt(T_ij) ln(1 + R_ij)`:
    T are the tokens computed by i that j reused, R the requests of j that did. What an agent reuses of its own counts
    for its efficiency only.

    The paper leaves open how each term is normalised. Here, `x` becomes `x / (x + m)`, where m is the median of the
    agents with a positive value. An agent that inflates a count gets at most 1, and does not lower the others' values,
    as the maximum or the sum would. The window is counted in turns: consecutive requests of an agent are one turn, so
    that a flood of requests does not displace those of others.

    Each request costs O(agents that it shares with), each round O(agents in the window + turns of the window).

    Parameters
    ----------
    alpha : float
        Weight of the intrinsic part, between 0 and 1. Below 0.5, sharing counts more, as in the paper.
    window : int
        Number of rounds that count.
    round_turns : int
        Turns of a round, after which the scores are computed.
    """

    def __init__(self, alpha: float = 0.4, window: int = 8, round_turns: int = 16) -> None:
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        for name, value in (("window", window), ("round_turns", round_turns)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        self.alpha, self.window, self.round_turns = alpha, window, round_turns
        self.current: Mapping[str, Contribution] = {}
        """Scores by agent, as of the last round."""
        self.history: deque[Mapping[str, Contribution]] = deque(maxlen=MAX_HISTORY)
        """Scores of the last rounds."""
        self.neutral = 0.5
        """Score of an agent that is new since the last round: the median of the others."""
        self._turns: deque[_Turn] = deque()
        self._since_round = 0  # turns
        self._totals: dict[str, _Totals] = {}
        self._pairs: dict[tuple[str, str], list[int]] = {}  # tokens and events, by owner and user
        self._collaborative: dict[str, float] = {}

    def add(self, call: Call) -> None:
        """Count a request that has ended; compute the scores if it completes a round."""
        agent = call.member.agent
        if not self._turns or self._turns[-1].agent != agent:
            self._turns.append(_Turn(agent))
            self._since_round += 1
            while len(self._turns) > self.window * self.round_turns:
                self._remove(self._turns.popleft())
        turn = self._turns[-1]
        for totals in (turn.totals, self._totals.setdefault(agent, _Totals())):
            totals.calls += 1
            totals.prompt_tokens += call.prompt_tokens
            totals.reused_tokens += sum(call.reused.values())
            totals.new_tokens += call.new_tokens
            totals.concurrency += call.concurrency
        turn.peak = max(turn.peak, call.concurrency)
        for owner, tokens in call.reused.items():
            if owner != agent:
                entry = turn.shared.setdefault(owner, [0, 0])
                entry[0], entry[1] = entry[0] + tokens, entry[1] + 1
                self._share(owner, agent, tokens, 1)
        if self._since_round >= self.round_turns:
            self._since_round = 0
            self.compute()

    def compute(self) -> None:
        """Compute the scores of all agents in the window."""
        agents = list(self._totals)
        totals = self._totals.values()
        peaks = dict.fromkeys(agents, 0)
        for turn in self._turns:
            peaks[turn.agent] = max(peaks[turn.agent], turn.peak)
        columns = [
            _normalised([one.calls for one in totals]),
            _normalised([one.prompt_tokens + one.new_tokens for one in totals]),
            _normalised([one.reused_tokens / max(one.prompt_tokens, 1) for one in totals]),
            _normalised([(self._totals[a].concurrency / self._totals[a].calls + peaks[a]) / 2 for a in agents]),
        ]
        intrinsic = _normalised([math.prod(factors) for factors in zip(*columns, strict=True)])
        collaborative = _normalised([self._collaborative.get(agent, 0.0) for agent in agents])
        self.current = {
            agent: Contribution(self.alpha * u + (1 - self.alpha) * v, u, v, *factors)
            for agent, u, v, factors in zip(agents, intrinsic, collaborative, zip(*columns, strict=True), strict=True)
        }
        self.neutral = median(one.score for one in self.current.values())
        self.history.append(self.current)

    def _remove(self, turn: _Turn) -> None:
        """Subtract a turn that has left the window."""
        totals, gone = self._totals[turn.agent], turn.totals
        totals.calls -= gone.calls
        totals.prompt_tokens -= gone.prompt_tokens
        totals.reused_tokens -= gone.reused_tokens
        totals.new_tokens -= gone.new_tokens
        totals.concurrency -= gone.concurrency
        if not totals.calls:
            del self._totals[turn.agent]
        for owner, (tokens, events) in turn.shared.items():
            self._share(owner, turn.agent, -tokens, -events)

    def _share(self, owner: str, user: str, tokens: int, events: int) -> None:
        """Change an edge of the graph of shared tokens, and with it the collaborative utility of both agents."""
        before = self._pairs.get((owner, user), [0, 0])
        after = self._pairs[owner, user] = [before[0] + tokens, before[1] + events]
        if not after[1]:
            del self._pairs[owner, user]
        for agent in (owner, user):
            total = self._collaborative.get(agent, 0.0) + _weight(*after) - _weight(*before)
            self._collaborative[agent] = total
            if total < EPSILON:
                del self._collaborative[agent]


def _weight(tokens: int, events: int) -> float:
    return math.sqrt(tokens) * math.log1p(events)


def _normalised(values: Collection[float]) -> list[float]:
    positive = [value for value in values if value > EPSILON]
    middle = median(positive) if positive else 1.0
    return [max(value, 0.0) / (max(value, 0.0) + middle) for value in values]
