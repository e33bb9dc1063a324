"""Eviction policies that know the agents: contribution scores, expected reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from hf_parallel.engine import (
    ContributionPolicy,
    Engine,
    RequestObserver,
)
from hf_parallel.engine.policies import ContributionScores
from hf_parallel.engine.policies.contribution import AgentRequest, Member

pytestmark = pytest.mark.usefixtures("one_thread")


def call(agent: str, prompt: int = 100, new: int = 10, concurrency: int = 1, **reused: int) -> AgentRequest:
    """Return a request that has ended; `reused` are tokens by the agent that computed them."""
    return AgentRequest(Member("", agent), concurrency, prompt, new, Counter(reused))


def scores_of(calls: list[AgentRequest], **settings: Any) -> ContributionScores:
    scores = ContributionScores(**{"round_turns": 10**6, **settings})
    for one in calls:
        scores.add(one)
    scores.compute()
    return scores


# Scores


def test_scores_are_those_of_the_equations() -> None:
    """Two agents: each term is x / (x + median), and the median of two values is their mean."""
    calls = [call("a", 100, 20), call("b", 300, 60, concurrency=3, a=60), call("a", 100, 20, a=50)]
    found = scores_of(calls, alpha=0.3).current

    def part(own: float, other: float) -> float:
        return own / (own + (own + other) / 2)

    activity, workload, efficiency = part(2, 1), part(240, 360), part(50 / 200, 60 / 300)
    concurrency = part(1, 3)
    intrinsic = activity * workload * efficiency * concurrency
    of_b = part(1, 2) * part(360, 240) * part(60 / 300, 50 / 200) * part(3, 1)
    assert (found["a"].activity, found["a"].workload) == pytest.approx((activity, workload))
    assert (found["a"].efficiency, found["a"].concurrency) == pytest.approx((efficiency, concurrency))
    assert found["a"].intrinsic == pytest.approx(part(intrinsic, of_b))
    assert found["a"].collaborative == found["b"].collaborative == pytest.approx(0.5)
    assert found["a"].score == pytest.approx(0.3 * part(intrinsic, of_b) + 0.7 * 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.5}, "alpha must be between 0 and 1, got 1.5"),
        ({"alpha": True}, "alpha"),
        ({"window": 0}, "window must be an int of at least 1, got 0"),
        ({"round_turns": 1.5}, "round_turns"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContributionPolicy(**settings)


# In an engine


class Agents:
    """Submits requests of agents to an engine, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, agent: str, prompt: list[int]) -> int:
        """Return the number of prompt tokens that were cached."""
        hints = {"workflow_id": "w", "agent_id": agent}
        handle = self.engine.submit(prompt, max_new_tokens=2, do_sample=False, agent_hints=hints)
        return handle.result().stats.reused_tokens


@pytest.fixture
def small_engine(model: Any, token_bytes: int) -> Iterator[Any]:
    """Return a function that opens an engine of 100 tokens with a policy, and closes the one before."""
    opened: list[Engine] = []

    def make(policy: Any) -> Agents:
        if opened:
            opened[-1].close()
        opened.append(Engine(model, max_kv_bytes=100 * token_bytes, policy=policy).__enter__())
        return Agents(opened[-1])

    yield make
    for engine in opened:
        engine.close()


def test_a_policy_learns_from_requests_what_they_use(small_engine: Any) -> None:
    seen: list[Any] = []

    class Recorder(RequestObserver):
        def priority(self, node: Any) -> float:
            return node.last_used

        def on_use(self, request: Any, nodes: Any) -> None:
            seen.append(("use", request.hints.agent_id, [len(node.tokens) for node in nodes]))

        def on_end(self, request: Any, nodes: Any) -> None:
            seen.append(("end", request.num_tokens, [len(node.tokens) for node in nodes]))

        def on_split(self, head: Any, tail: Any) -> None:
            seen.append(("split", len(head.tokens), len(tail.tokens)))

    agents = small_engine(Recorder())
    agents.ask("a", [5, 6, 7, 8])
    agents.ask("b", [5, 6, 9])
    assert seen == [
        *(("use", "a", [4]), ("use", "a", [1]), ("end", 2, [4, 1])),
        *(("split", 2, 2), ("use", "b", [2, 1]), ("use", "b", [1]), ("end", 2, [2, 1, 1])),
    ]
