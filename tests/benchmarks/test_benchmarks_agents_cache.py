"""`python -m benchmarks.agents_cache`: its budgets and ratios."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny

pytest.importorskip("greenlet")

import hf_parallel
from benchmarks import agents_cache as benchmark
from hf_parallel.agents import FiveAgents, simulate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_budget_is_that_at_which_lru_has_the_hit_rate() -> None:
    trace = FiveAgents(2, 0).trace()
    budget = benchmark.budget_of(trace, 0.85)
    rates = {other: simulate(trace, "lru", other).hotspot_hit_rate for other in range(budget - 300, budget + 400, 100)}
    assert abs(rates[budget] - 0.85) == min(abs(rate - 0.85) for rate in rates.values())


def test_ratios_are_those_to_lru() -> None:
    traces = [FiveAgents(3, seed).trace() for seed in range(2)]
    unlimited, lru, other = benchmark.compare(traces, [7000, 6900], ("lru", "contribution"))
    runs = [(simulate(t, "lru", b), simulate(t, "contribution", b)) for t, b in zip(traces, (7000, 6900), strict=True)]
    assert (lru["fewer_misses"]["mean"], lru["fewer_evicted"]["most"]) == (0, 1)
    assert other["fewer_misses"]["mean"] == pytest.approx(
        sum(1 - b.hotspot_misses / a.hotspot_misses for a, b in runs) / 2
    )
    assert other["fewer_evicted"]["least"] == min(a.evicted_tokens / b.evicted_tokens for a, b in runs)
    assert unlimited["evicted_tokens"] == 0


def test_no_policy_evicts_less_than_the_bound() -> None:
    trace = FiveAgents(3, 0).trace()
    storage_of_all = benchmark._stored(simulate(trace), trace)
    assert simulate(trace, "lru", storage_of_all).evicted_tokens == 0
    assert simulate(trace, "lru", storage_of_all - 1).evicted_tokens > 0
    entries = benchmark.compare([trace], [7000], benchmark.POLICIES)
    bound = entries[0]["fewer_evicted"]["mean"]
    assert all(entry["fewer_evicted"]["mean"] <= bound for entry in entries[1:])


def test_the_simulator_is_compared_with_an_engine_and_the_policy_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "AGENTS", 8)
    model: Any = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    (entry,) = benchmark.beside_engine(model, ("contribution",), 1, lambda words: None)
    assert entry["is_equal"]
    assert entry["times_faster"] > 1
    found = benchmark.overhead(2, lambda words: None)
    assert found["requests"] == 16
    assert 0 < found["scores_by_step"] < found["policy_by_step"] < 1
