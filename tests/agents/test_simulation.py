"""The simulation equals the engine, and the policies keep their promises on simulated traces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from benchmarks.agents_cache import OTHERS, POLICIES, FiveAgents, measure
from benchmarks.cache_simulation import TraceRequest, simulate
from hf_parallel.engine import ContributionPolicy, Engine

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = (tiny.EOS + 1, tiny.VOCAB_SIZE)
SMALL: dict[str, Any] = {
    **{"loops": 2, "code": 150, "task": 20, "role": 15},
    **{"documents": 70, "summary": 20, "message": 9, "answer": 12, "report": 12},
}


def replay(trace: Sequence[TraceRequest], engine: Engine) -> list[int]:
    """Run a trace in an engine, with the trace's outputs as answers, and return the reused tokens of each request."""
    reused = []
    for request in trace:
        prompt, output = request.prompt, request.output

        def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, output[input_ids.shape[1] - len(prompt)]] = 0  # noqa: B023
            return forced

        settings: dict[str, Any] = {"max_new_tokens": len(output), "min_new_tokens": len(output), "do_sample": False}
        handle = engine.submit(prompt, logits_processor=[force], agent_hints=request.hints, **settings)
        reused.append(handle.result().stats.cached_tokens)
    return reused


ALL = POLICIES | OTHERS


@pytest.mark.parametrize(("policy", "max_tokens"), [*zip(ALL, itertools.cycle([500, 650]))])
def test_hits_and_evictions_equal_those_of_the_engine(
    model: Any, token_bytes: int, policy: str, max_tokens: int
) -> None:
    trace = FiveAgents(1, 0, **SMALL, vocabulary=VOCABULARY).trace()
    with Engine(model, max_kv_bytes=max_tokens * token_bytes, policy=ALL[policy]()) as engine:
        reused = replay(trace, engine)
        evicted = engine.stats.evicted_tokens
    simulated = simulate(trace, ALL[policy](), max_tokens)
    assert simulated.reused == reused
    assert simulated.evicted_tokens == evicted > 0


def test_without_a_limit_every_token_seen_before_is_a_hit() -> None:
    trace = FiveAgents(2, 1, **SMALL).trace()
    seen: list[np.ndarray] = []
    for request, reused in zip(trace, simulate(trace).reused, strict=True):
        prompt, output = np.array(request.prompt), np.array(request.output)
        assert reused == max((shared(prompt, other) for other in seen), default=0)
        seen.append(np.concatenate([prompt, output[:-1]]))


def shared(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    return int(np.append(a[:size] != b[:size], True).argmax())


def test_contribution_halves_the_misses_of_the_hotspots() -> None:
    """At the budget where LRU has the hit rate of the paper's baseline, 0.90."""
    trace = FiveAgents(7, 0).trace()
    lru, contribution = (measure(trace, 7100, policy) for policy in (None, ContributionPolicy()))
    assert 0.89 < lru["hotspot_hit_rate"] < 0.92
    assert contribution["hotspot_misses"] <= 0.5 * lru["hotspot_misses"]
    assert contribution["evicted_tokens"] <= lru["evicted_tokens"] / 1.5


def test_scores_follow_agents_that_exchange_their_parts() -> None:
    trace = FiveAgents(10, 0, is_changing=True).trace()
    policy = ContributionPolicy()
    lru, contribution = measure(trace, 7300), measure(trace, 7300, policy)
    assert contribution["hotspot_misses"] <= 0.6 * lru["hotspot_misses"]
    score = {agent: one.score for agent, one in policy.scores.current.items()}
    assert score["Searcher"] > score["Viewer"]
