"""The simulator of the cache: equal to the engine, and the traces with which policies are compared."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tiny

pytest.importorskip("greenlet")

import hf_parallel
from hf_parallel.agents import (
    FiveAgents,
    Trace,
    TraceRequest,
    random_trace,
    replay,
    score_plot,
    simulate,
    with_adversary,
)
from hf_parallel.agents.simulation.simulator import POLICIES
from hf_parallel.engine import ContributionPolicy, Engine, KVBudgetError, TimeToLive
from hf_parallel.engine.policies import Contribution

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = (tiny.EOS + 1, tiny.VOCAB_SIZE)
SMALL: dict[str, Any] = {
    **{"loops": 2, "code": 150, "task": 20, "role": 15},
    **{"documents": 70, "summary": 20, "message": 9, "answer": 12, "report": 12},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


@pytest.fixture(scope="module")
def token_bytes(model: Any) -> int:
    with Engine(model) as engine:
        engine.submit([5, 6, 7], max_new_tokens=1).result()
        return engine._storage.arena.bytes_per_token


@pytest.mark.parametrize(("policy", "max_tokens"), [*zip(POLICIES, itertools.cycle([500, 650]))])
def test_hits_and_evictions_are_those_of_the_engine(model: Any, token_bytes: int, policy: str, max_tokens: int) -> None:
    trace = replace(FiveAgents(2, 0, **SMALL).trace(), vocabulary=VOCABULARY)
    with Engine(model, max_kv_bytes=max_tokens * token_bytes, policy=POLICIES[policy]()) as engine:
        computed = replay(trace, engine)
    simulated = simulate(trace, policy, max_tokens)
    assert simulated.reused == computed.reused
    assert simulated.evicted_tokens == computed.evicted_tokens > 0
    assert simulated.seconds < computed.seconds / 10


def test_a_random_trace_has_the_hits_of_the_engine(model: Any, token_bytes: int) -> None:
    short = [
        replace(one, prompt=tuple((str(part[0]), 1 + int(part[1]) // 20) for part in one.prompt), output=("x", 1))
        for one in random_trace(3, num_requests=60).requests
    ]
    trace = Trace(tuple(short), VOCABULARY)
    with Engine(model, max_kv_bytes=400 * token_bytes) as engine:
        computed = replay(trace, engine)
    simulated = simulate(trace, max_tokens=400)
    assert (simulated.reused, simulated.evicted_tokens) == (computed.reused, computed.evicted_tokens)
    assert simulated.evicted_tokens > 0


def test_without_a_limit_everything_that_was_seen_is_a_hit() -> None:
    trace = FiveAgents(2, 1, **SMALL).trace()
    seen: list[np.ndarray] = []
    for request, reused in zip(trace.requests, simulate(trace).reused, strict=True):
        prompt, output = trace.prompt_of(request), trace.output_of(request)
        assert reused == max((shared(prompt, other) for other in seen), default=0)
        seen.append(np.concatenate([prompt, output[:-1]]))


def shared(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    return int(np.append(a[:size] != b[:size], True).argmax())


def test_hits_and_misses_are_all_prompt_tokens() -> None:
    trace = FiveAgents(3, 0).trace()
    found = simulate(trace, max_tokens=7000)
    hot = sum(one.prompt_tokens for one in trace.requests if one.agent in ("Viewer", "Patcher"))
    assert found.hotspot_hits + found.hotspot_misses == hot
    assert found.hits + found.misses == sum(one.prompt_tokens for one in trace.requests)
    assert found.hotspot_hit_rate == found.hotspot_hits / hot


@pytest.mark.parametrize("seed", range(3))
def test_contribution_halves_the_misses_of_the_hotspots(seed: int) -> None:
    """The memory is limited so that LRU has the hit rate of the paper's baseline, 0.90."""
    budgets = (7100, 7400, 6900)
    trace = FiveAgents(7, seed).trace()
    lru, contribution = (simulate(trace, policy, budgets[seed]) for policy in ("lru", "contribution"))
    assert 0.89 < lru.hotspot_hit_rate < 0.92
    assert contribution.hotspot_misses <= 0.5 * lru.hotspot_misses
    assert contribution.evicted_tokens <= lru.evicted_tokens / 1.5


def test_agents_that_exchange_their_parts_are_followed() -> None:
    trace = FiveAgents(14, 0, is_changing=True).trace()
    lru, contribution = (simulate(trace, policy, 7300) for policy in ("lru", "contribution"))
    assert contribution.hotspot_misses <= 0.6 * lru.hotspot_misses
    score = {agent: one.score for agent, one in contribution.policy.scores.current.items()}
    assert score["Searcher"] > score["Viewer"]


@pytest.mark.parametrize("imitates", [False, True])
def test_an_agent_that_inflates_its_score_does_not_displace_the_hotspots(imitates: bool) -> None:
    honest = FiveAgents(7, 0).trace()
    alone = simulate(honest, "contribution", 8500)
    beside = simulate(with_adversary(honest, imitates=imitates), "contribution", 8500)
    lru = simulate(with_adversary(honest, imitates=imitates), "lru", 8500)
    assert beside.hotspot_hit_rate > alone.hotspot_hit_rate - 0.02
    assert beside.hotspot_hit_rate > lru.hotspot_hit_rate - 0.005


def test_a_policy_object_is_returned_with_its_state() -> None:
    policy = ContributionPolicy(alpha=0.2)
    found = simulate(FiveAgents(3, 0, **SMALL).trace(), policy, 700)
    assert found.policy is policy
    assert policy.scores.current.keys() == {"Decision", "Patcher", "Viewer", "Summary", "Searcher"}


def test_time_to_live_has_the_time_of_the_trace() -> None:
    requests = (
        TraceRequest("a", (("x", 50),), ("y", 2), tool_ms=10_000),
        TraceRequest("b", (("z", 50),), ("y", 2), gap=1.0),
        TraceRequest("a", (("x", 50),), ("y", 2), gap=1.0),
    )
    waiting = simulate(Trace(requests), TimeToLive(), 80)
    late = replace(requests[1], gap=100.0)
    assert waiting.reused == [0, 0, 0]  # "b" alone does not fit beside "a", which is evicted although it waits
    longer = (*requests[:1], replace(requests[1], prompt=(("z", 20),)), replace(late, prompt=(("w", 20),)), requests[2])
    assert simulate(Trace(longer), TimeToLive(), 80).reused[-1] == 0
    soon = (*requests[:1], replace(requests[1], prompt=(("z", 20),)), replace(requests[1], prompt=(("w", 20),)))
    assert simulate(Trace((*soon, requests[2])), TimeToLive(), 80).reused[-1] == 50


@pytest.mark.parametrize("make", [lambda: FiveAgents(2, 0).trace(), lambda: random_trace(0)])
def test_a_trace_is_saved_and_loaded(make: Any, tmp_path: Path) -> None:
    trace = make()
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace


def test_a_trace_may_hold_token_ids(tmp_path: Path) -> None:
    trace = Trace((TraceRequest("a", ([5, 6, 7],), [8, 9]), TraceRequest("a", ([5, 6, 7, 8], ("x", 3)), ("y", 2))))
    trace.save(tmp_path / "trace.json")
    assert simulate(Trace.load(tmp_path / "trace.json")).reused == [0, 4]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"requests": [{}]}',
        '{"requests": [{"agent": "a", "prompt": [["x", 0]], "output": ["y", 1]}]}',
        '{"requests": [{"agent": "a", "prompt": [["x", 1]], "output": []}]}',
        '{"requests": [{"agent": "a", "prompt": [["x", 1]], "output": [1], "gaps": 1}]}',
        '{"requests": [], "other": 1}',
    ],
)
def test_what_is_no_trace_raises(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json is no trace"):
        Trace.load(tmp_path / "trace.json")


def test_bad_arguments_raise() -> None:
    trace = FiveAgents(1, 0).trace()
    with pytest.raises(ValueError, match="policy must be one of .*'lru'.* got 'fifo'"):
        simulate(trace, "fifo")
    with pytest.raises(ValueError, match="max_tokens must be an int of at least 1, got 0"):
        simulate(trace, max_tokens=0)
    with pytest.raises(ValueError, match=r"must have a method priority\(node\)"):
        simulate(trace, object())  # type: ignore[arg-type]
    with pytest.raises(KVBudgetError):
        simulate(trace, max_tokens=1000)


def test_the_scores_are_drawn_over_time() -> None:
    policy = simulate(FiveAgents(7, 0).trace(), "contribution", 7100).policy
    root = ElementTree.fromstring(score_plot(policy.scores.history))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Decision", "Patcher", "Viewer", "Summary", "Searcher"} <= set(texts)
    lines = [element.get("points", "").split() for element in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert max(map(len, lines)) == len(policy.scores.history) > 5


def test_a_plot_escapes_names_and_may_be_empty() -> None:
    score = Contribution(*[0.5] * 7)
    assert ElementTree.fromstring(score_plot([{"<b>&": score}], "intrinsic")) is not None
    assert ElementTree.fromstring(score_plot([])) is not None
    with pytest.raises(ValueError, match="part must be one of .* got 'total'"):
        score_plot([], "total")


def test_an_agent_whose_prefix_is_always_evicted_before_its_next_request_is_learned() -> None:
    """The rules of two agents alternate with texts that are used once; all of a round do not fit."""
    requests = []
    for number in range(12):
        texts = (("Searcher", f"text {number}", 30), ("Summary", f"report {number}", 30))
        for agent, name, length in (("Patcher", "rules", 24), ("Viewer", "guide", 24), *texts):
            requests.append(TraceRequest(agent, ((name, length),), ("answer", 2)))
    lru, contribution = (simulate(Trace(tuple(requests)), policy, 100) for policy in ("lru", "contribution"))
    assert lru.hits == 0
    assert contribution.reused[-8:] == [24, 24, 0, 0] * 2
