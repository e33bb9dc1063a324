"""Compares eviction policies on traces of agents (Hive, section 8.3): `python -m benchmarks.agents_cache --help`.

- `workflow`: the five agents of the paper, 7 and 21 rounds, ten seeds, beside LRU. The budget of each trace is the one
  at which LRU has the hit rate of the paper's baseline for the hotspots: 0.903 and 0.935.
- `lengths`: the same with other lengths. `budgets`: the same with other budgets.
- `settings`: other weights and windows of the scores, at a small budget.
- `robustness`: agents that exchange their parts half-way, agents that inflate their score, and random agents.
- `engine`: the simulator beside an engine with the model, on the same trace.
- `overhead`: the time of the policy in an engine that serves 100 agents at once with a tiny random model.

All but the last two parts are simulated, and give the same figures on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.agents import (
    CacheResult,
    FiveAgents,
    Trace,
    random_trace,
    replay,
    score_plot,
    simulate,
    with_adversary,
)
from hf_parallel.engine import ContributionPolicy, Engine
from hf_parallel.engine.policies import ContributionScores

from .__main__ import about, add_model_options, finish, new_path, set_up, table_of

Log = Callable[[str], None]
Policy = Callable[[], Any]
POLICIES: dict[str, Policy] = {
    "lru": lambda: "lru",
    "contribution": lambda: "contribution",
    "reuse": lambda: ContributionPolicy(order="reuse"),
    "score": lambda: ContributionPolicy(order="score"),
    "steps": lambda: "steps",
    "ttl": lambda: "ttl",
}
"""`reuse` and `score` are the two parts of `contribution`; `score` is the order of the paper."""
PAPER = {7: 0.903, 21: 0.935}
"""Hit rate of the hotspots with LRU in the paper, by rounds."""
GRID = 100
"""Tokens between the budgets that are tried."""
TARGETS = {"fewer_misses": 0.5, "fewer_evicted": 1.5}
SMALL: dict[str, Any] = {
    "loops": 2,
    "code": 200,
    "documents": 80,
    "summary": 30,
    "message": 10,
    "answer": 12,
    "report": 15,
}
"""A workflow that a model computes in a minute."""
LONGER: dict[str, Any] = {"loops": 5, "task": 100, "role": 100, "message": 30, "answer": 60, "report": 100}
LONGER["documents"] = 800
ENGINE_BUDGET = 700
AGENTS = 100


def budget_of(trace: Trace, hit_rate: float) -> int:
    """Return the budget at which the hotspots' hit rate with LRU is nearest to a given one."""
    longest = max(one.prompt_tokens + trace.output_of(one).size for one in trace.requests)
    enough = -(-longest // GRID) * GRID
    while simulate(trace, "lru", enough).hotspot_hit_rate < hit_rate:
        enough += 5 * GRID
    near = range(max(enough - 9 * GRID, longest), enough + 2 * GRID, GRID)
    return min(near, key=lambda budget: abs(simulate(trace, "lru", budget).hotspot_hit_rate - hit_rate))


def figures(result: CacheResult) -> dict[str, float]:
    """Return the entry of one run."""
    return {
        "hotspot_hit_rate": result.hotspot_hit_rate,
        "other_hit_rate": result.other_hit_rate,
        "hotspot_misses": result.hotspot_misses,
        "other_misses": result.other_misses,
        "evicted_tokens": result.evicted_tokens,
    }


def compare(traces: Sequence[Trace], budgets: Sequence[int], policies: Iterable[str]) -> list[dict[str, Any]]:
    """Return, for each policy, means over traces, and spreads of the ratios to LRU; without a limit as `unlimited`.

    Each token is computed at least once, and no more than the budget remain: the other tokens are evicted under any
    policy. In the entry `unlimited`, `fewer_evicted` is the number of tokens that LRU evicts, divided by this minimum.
    """
    unlimited = [simulate(trace) for trace in traces]
    lru = [simulate(trace, "lru", budget) for trace, budget in zip(traces, budgets, strict=True)]
    least = [max(_stored(one, trace) - b, 1) for one, trace, b in zip(unlimited, traces, budgets, strict=True)]
    bound = _spread([base.evicted_tokens / number for base, number in zip(lru, least, strict=True)])
    entries: list[dict[str, Any]] = [{"policy": "unlimited", **_means(unlimited), "fewer_evicted": bound}]
    for name in policies:
        runs = [simulate(trace, POLICIES[name](), b) for trace, b in zip(traces, budgets, strict=True)]
        pairs = list(zip(runs, lru, unlimited, strict=True))
        fewer = [1 - one.hotspot_misses / base.hotspot_misses for one, base, _ in pairs]
        evicted = [base.evicted_tokens / max(one.evicted_tokens, 1) for one, base, _ in pairs]
        avoidable = [base.hotspot_misses - least.hotspot_misses for _, base, least in pairs]
        avoided = [(base.hotspot_misses - one.hotspot_misses) for one, base, _ in pairs]
        entries.append(
            {
                "policy": name,
                **_means(runs),
                "fewer_misses": _spread(fewer),
                "fewer_evicted": _spread(evicted),
                "of_avoidable_misses": sum(avoided) / max(sum(avoidable), 1),
                "runs": [figures(run) for run in runs],
            }
        )
    return entries


def _stored(unlimited: CacheResult, trace: Trace) -> int:
    """Return the tokens that a run without a limit has stored; the last of each answer is not."""
    return unlimited.misses + sum(len(trace.output_of(request)) - 1 for request in trace.requests)


def _means(runs: Sequence[CacheResult]) -> dict[str, float]:
    rows = [figures(run) for run in runs]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.mean(values),
        "least": min(values),
        "most": max(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def workflow(seeds: int, log: Log) -> list[dict[str, Any]]:
    """Compare all policies on the workflow of the paper."""
    entries = []
    for rounds, hit_rate in PAPER.items():
        log(f"workflow, {rounds} rounds")
        traces = [FiveAgents(rounds, seed).trace() for seed in range(seeds)]
        budgets = [budget_of(trace, hit_rate) for trace in traces]
        entries += [{"rounds": rounds, "budgets": budgets, **entry} for entry in compare(traces, budgets, POLICIES)]
    return entries


def other_lengths(seeds: int, log: Log) -> list[dict[str, Any]]:
    """Compare on the same workflow with shorter main paths, and longer prompts of the other agents."""
    entries = []
    for rounds, hit_rate in PAPER.items():
        log(f"other lengths, {rounds} rounds")
        traces = [FiveAgents(rounds, seed, **LONGER).trace() for seed in range(seeds)]
        budgets = [budget_of(trace, hit_rate) for trace in traces]
        found = compare(traces, budgets, ("lru", "contribution", "reuse"))
        entries += [{"rounds": rounds, "budgets": budgets, **entry} for entry in found]
    return entries


def other_budgets(seeds: int, log: Log) -> list[dict[str, Any]]:
    """Compare at other budgets, the same for all seeds."""
    traces = [FiveAgents(7, seed).trace() for seed in range(seeds)]
    entries = []
    for budget in (4500, 5500, 6500, 7500, 8500, 9500):
        log(f"budget of {budget} tokens")
        found = compare(traces, [budget] * seeds, ("lru", "contribution", "reuse"))
        entries += [{"budget": budget, **entry} for entry in found]
    return entries


def settings(seeds: int, log: Log) -> list[dict[str, Any]]:
    """Compare settings of the scores, at a budget that does not hold what the hotspots use."""
    entries = []
    traces = [FiveAgents(21, seed).trace() for seed in range(seeds)]
    given: list[dict[str, Any]] = [{"alpha": alpha} for alpha in (0.0, 0.2, 0.4, 0.6, 1.0)]
    given += [{"window": window} for window in (2, 32)]
    for one in given:
        log(f"settings {one}")
        runs = [simulate(trace, ContributionPolicy(**one), 5500) for trace in traces]
        entries.append({**one, **_means(runs)})
    return entries


def robustness(seeds: int, log: Log) -> list[dict[str, Any]]:
    """Compare all policies on other traces."""
    honest = [FiveAgents(7, seed).trace() for seed in range(seeds)]
    kinds: dict[str, tuple[list[Trace], int]] = {
        "exchange": ([FiveAgents(14, seed, is_changing=True).trace() for seed in range(seeds)], 7200),
        "alone": (honest, 8200),
        "flood": ([with_adversary(trace, seed) for seed, trace in enumerate(honest)], 8200),
        "imitation": ([with_adversary(trace, seed, imitates=True) for seed, trace in enumerate(honest)], 8200),
        **{f"random_{budget}": ([random_trace(seed) for seed in range(seeds)], budget) for budget in (12000, 24000)},
    }
    entries = []
    for name, (traces, budget) in kinds.items():
        log(name)
        entries += [{"trace": name, "budget": budget, **entry} for entry in compare(traces, [budget] * seeds, POLICIES)]
    return entries


def beside_engine(model: Any, policies: Sequence[str], rounds: int, log: Log) -> list[dict[str, Any]]:
    """Run a trace in an engine and in the simulator."""
    trace = replace(
        FiveAgents(rounds, 0, **SMALL).trace(), vocabulary=(model.config.vocab_size // 2, model.config.vocab_size)
    )
    with Engine(model) as engine:
        engine.submit([5, 6], max_new_tokens=1).result()
        token_bytes = engine._storage.arena.bytes_per_token
    entries = []
    for name in policies:
        log(f"{name} in an engine")
        chosen = POLICIES[name]()
        policy = simulate(Trace(()), chosen).policy if isinstance(chosen, str) else chosen
        with Engine(model, max_kv_bytes=ENGINE_BUDGET * token_bytes, policy=policy) as engine:
            computed = replay(trace, engine)
        simulated = simulate(trace, POLICIES[name](), ENGINE_BUDGET)
        entries.append(
            {
                "policy": name,
                "requests": len(trace.requests),
                "engine": figures(computed) | {"seconds": computed.seconds},
                "simulator": figures(simulated) | {"seconds": simulated.seconds},
                "is_equal": figures(computed) == figures(simulated) and computed.reused == simulated.reused,
                "times_faster": computed.seconds / simulated.seconds,
            }
        )
    return entries


class Timed:
    """Adds up the seconds of some methods; those inside others are counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def wrap(self, owner: Any, *names: str) -> None:
        """Replace methods of an object by ones that are timed."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if self._inside:
                return function(*given)
            began, self._inside = time.perf_counter(), True
            try:
                return function(*given)
            finally:
                self.seconds, self._inside = self.seconds + time.perf_counter() - began, False

        return call


def overhead(rounds: int, log: Log) -> dict[str, Any]:
    """Time the policy in an engine that serves 100 agents at once, with a tiny random model."""
    log(f"{AGENTS} agents at once")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    policy = ContributionPolicy()
    of_policy, of_scores = Timed(), Timed()
    of_scores.wrap(policy.scores, "add")
    of_policy.wrap(policy, "on_use", "on_end", "on_split", "on_evict", "priority")
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 512, (length,), generator=generator).tolist()

    task = tokens(30)
    rules = [tokens(20) for _ in range(AGENTS)]
    with Engine(model, max_kv_bytes=2**22, max_rows=AGENTS, policy=policy) as engine:
        for _ in range(rounds):
            handles = [
                engine.submit(
                    [*task, *rules[agent], *tokens(20)],
                    max_new_tokens=32,
                    do_sample=True,
                    agent_hints={"workflow_id": "1", "agent_id": str(agent)},
                )
                for agent in range(AGENTS)
            ]
            for handle in handles:
                handle.result()
        stats = engine.stats
    return {
        "agents": AGENTS,
        "requests": AGENTS * rounds,
        "steps": stats.steps,
        "evicted_tokens": stats.evicted_tokens,
        "step_seconds": stats.step_seconds / stats.steps,
        "scores_by_step": of_scores.seconds / stats.step_seconds,
        "policy_by_step": of_policy.seconds / stats.step_seconds,
        "score_rounds": len(policy.scores.history),
        "scored_agents": len(policy.scores.current),
        "seconds_of_a_round": _seconds_of_a_round(policy.scores),
    }


def _seconds_of_a_round(scores: ContributionScores) -> float:
    began = time.perf_counter()
    for _ in range(100):
        scores.compute()
    return (time.perf_counter() - began) / 100


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the results with their targets."""
    found = []
    for entry in report["workflow"]:
        if entry["policy"] == "contribution":
            for name, least in TARGETS.items():
                mean = entry[name]["mean"]
                words = f"{entry['rounds']} rounds: {name}"
                found.append({"what": words, "value": mean, "at_least": least, "met": mean >= least})
    found.append({"what": "scores by step", "value": report["overhead"]["scores_by_step"], "at_most": 0.01})
    found[-1]["met"] = found[-1]["value"] <= 0.01
    return found


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    for part, name in (("workflow", "rounds"), ("lengths", "rounds"), ("budgets", "budget"), ("robustness", "trace")):
        table = table_of(part, "hotspots", "others", "evicted", "fewer misses", "evicted by LRU / by it")
        for entry in report[part]:
            cells = [
                f"{entry['hotspot_hit_rate']:.3f}",
                f"{entry['other_hit_rate']:.3f}",
                f"{entry['evicted_tokens']:.0f}",
            ]
            if "fewer_misses" in entry:
                fewer, evicted = entry["fewer_misses"], entry["fewer_evicted"]
                cells.append(f"{fewer['mean']:.0%} ({fewer['least']:.0%} to {fewer['most']:.0%})")
                cells.append(f"{evicted['mean']:.2f} ({evicted['least']:.2f} to {evicted['most']:.2f})")
            table.add_row(f"{entry[name]}: {entry['policy']}", *cells)
        console.print(table)
    for entry in (*report["settings"], *report["engine"], report["overhead"], *report["targets"]):
        console.print(entry)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents_cache", description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds and one round, to check that everything runs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the scores of 21 rounds as SVG")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    add_model_options(parser)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    model, _ = set_up(options)
    seeds, few = (2, 2) if options.quick else (10, 5)
    report = about(model, options) | {"quick": options.quick, "seeds": seeds}
    log = console.print
    report["workflow"] = workflow(seeds, log)
    report["lengths"] = other_lengths(few, log)
    report["budgets"] = other_budgets(few, log)
    report["settings"] = settings(few, log)
    report["robustness"] = robustness(few, log)
    report["engine"] = beside_engine(model, ("lru", "contribution"), 1 if options.quick else 2, log)
    report["overhead"] = overhead(1 if options.quick else 10, log)
    report["targets"] = targets(report)
    if options.plot is not None:
        policy = ContributionPolicy()
        simulate(FiveAgents(21, 0).trace(), policy, report["workflow"][-1]["budgets"][0])
        options.plot.write_text(score_plot(policy.scores.history), encoding="utf-8")
    finish(console, report, options.output or new_path("agents-cache", options.quick), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
