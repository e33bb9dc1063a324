"""Compares eviction policies on traces of agents (Hive, section 8.3), simulated: the same figures on every machine.

- `workflow`: the five agents of the paper, in 7 and 21 rounds, at the budget where LRU has the hotspot hit rate of the
  paper's baseline: 0.903 and 0.935.
- `budgets`: the same with other budgets.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_parallel.agents import CacheResult, Trace, TraceRequest, simulate
from hf_parallel.agents.simulation import POLICIES, PromptSegment

AGENTS = ("Decision", "Patcher", "Viewer", "Summary", "Searcher")
HOTSPOTS = ("Patcher", "Viewer")
PAPER = {7: 0.903, 21: 0.935}
"""Hit rate of the hotspots with LRU in the paper, by rounds."""
GRID = 100
"""Step between tried budgets, in tokens."""
SIZES, QUICK = {"seeds": 10, "few": 5}, {"seeds": 1, "few": 1}
"""Traces of `workflow` and of `budgets`."""


@dataclass(frozen=True)
class FiveAgents:
    """The workflow of five agents of Hive, section 8.3 and figure 3. The paper does not give the lengths.

    In each round, Decision sends work to Viewer and Patcher `loops` times. These two are the hotspots, and continue a
    conversation. Then Searcher retrieves long documents that are used once, and Summary reads them with the report of
    the round. In the next round, the conversations begin again with this summary.

    Default lengths make LRU reproduce the paper's hit rates (0.90 for hotspots and 0.31 for others in 7 rounds) at the
    budget where its hotspot hit rate matches. Lengths vary by `spread`. `is_changing`: half-way, Searcher and Summary
    take over the parts of Viewer and Patcher.
    """

    rounds: int = 7
    seed: int = 0
    loops: int = 7
    task: int = 50  # tokens with which all prompts begin
    role: int = 50
    code: int = 2000  # tokens of the files of Viewer and Patcher
    message: int = 25
    answer: int = 40
    report: int = 60
    documents: int = 600
    summary: int = 150
    spread: float = 0.3
    is_changing: bool = False

    def trace(self) -> Trace:
        """Return the trace."""
        rng = random.Random(self.seed)
        requests: list[TraceRequest] = []
        name = f"five agents, seed {self.seed}"

        def length(mean: int) -> int:
            return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

        task = (f"{name}: task", length(self.task))
        roles = {agent: (f"{name}: {agent}", length(self.role)) for agent in AGENTS}
        code = {agent: (f"{name}: code of {agent}", length(self.code)) for agent in HOTSPOTS}
        parts = {agent: agent for agent in AGENTS}  # agent by part
        kept: list[PromptSegment] = []  # the summary of the rounds so far

        def add(agent: str, prompt: Sequence[PromptSegment], answer: int) -> PromptSegment:
            output = f"{name}: answer {len(requests)}", length(answer)
            rng.random()  # published figures have this draw
            given = (task, roles[agent], *prompt)
            requests.append(TraceRequest(parts[agent], given, output, name, agent in HOTSPOTS))
            return output

        def decide(where: str) -> None:
            add("Decision", [(f"{name}: state {where}", length(self.report))], self.message)

        for number in range(self.rounds):
            if self.is_changing and number == self.rounds // 2:
                parts |= {"Viewer": "Searcher", "Searcher": "Viewer", "Patcher": "Summary", "Summary": "Patcher"}
            talks: dict[str, list[PromptSegment]] = {"Viewer": [], "Patcher": []}
            for loop in range(self.loops):
                decide(f"{number}.{loop}")
                for agent, talk in talks.items():
                    talk.append((f"{name}: message {number}.{loop} {agent}", length(self.message)))
                    talk.append(add(agent, [code[agent], *kept, *talk], self.answer))
            decide(f"{number} search")
            documents = (f"{name}: documents {number}", length(self.documents))
            add("Searcher", [documents], self.message)
            report = (f"{name}: report {number}", length(self.report))
            kept = [add("Summary", [*kept, report, documents], self.summary)]
        return Trace(tuple(requests))


def load(options: Any) -> tuple[None, None]:
    """Load nothing."""
    return None, None


def budget_of(trace: Trace, hit_rate: float) -> int:
    """Return the budget at which LRU's hotspot hit rate is nearest to a given one."""
    longest = max(len(trace.prompt_of(one)) + len(trace.output_of(one)) for one in trace.requests)
    enough = -(-longest // GRID) * GRID
    while simulate(trace, "lru", enough).hotspot_hit_rate < hit_rate:
        enough += 5 * GRID
    near = range(max(enough - 9 * GRID, longest), enough + 2 * GRID, GRID)
    return min(near, key=lambda budget: abs(simulate(trace, "lru", budget).hotspot_hit_rate - hit_rate))


def compare(traces: Sequence[Trace], budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Return means over traces for each policy and without a limit (`unlimited`), with the spread of ratios to LRU.

    Every token is computed at least once and at most the budget remains, so any policy evicts the other tokens. In the
    entry `unlimited`, `fewer_evicted` is the number of tokens that LRU evicts, divided by this minimum.
    """
    unlimited = [simulate(trace) for trace in traces]
    pairs = list(zip(traces, budgets, strict=True))
    runs = {name: [simulate(trace, name, budget) for trace, budget in pairs] for name in POLICIES}
    lru = runs["lru"]
    least = [max(stored(one, trace) - budget, 1) for one, (trace, budget) in zip(unlimited, pairs, strict=True)]
    bound = _spread([base.evicted_tokens / number for base, number in zip(lru, least, strict=True)])
    entries: list[dict[str, Any]] = [{"policy": "unlimited", **_means(unlimited), "fewer_evicted": bound}]
    for name, found in runs.items():
        beside = list(zip(found, lru, strict=True))
        entries.append(
            {
                "policy": name,
                **_means(found),
                "fewer_misses": _spread([1 - one.hotspot_misses / base.hotspot_misses for one, base in beside]),
                "fewer_evicted": _spread([base.evicted_tokens / max(one.evicted_tokens, 1) for one, base in beside]),
            }
        )
    return entries


def stored(unlimited: CacheResult, trace: Trace) -> int:
    """Return the tokens stored in a run without a limit: all but the last of each answer."""
    answers = sum(len(trace.output_of(request)) - 1 for request in trace.requests)
    return unlimited.hotspot_misses + unlimited.other_misses + answers


def _means(runs: Sequence[CacheResult]) -> dict[str, float]:
    names = ("hotspot_hit_rate", "other_hit_rate", "hotspot_misses", "other_misses", "evicted_tokens")
    return {name: statistics.mean(getattr(run, name) for run in runs) for name in names}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "least": min(values), "most": max(values)}


def workflow(seeds: int) -> list[dict[str, Any]]:
    """Compare the policies on the workflow of the paper."""
    entries = []
    for rounds, hit_rate in PAPER.items():
        traces = [FiveAgents(rounds, seed).trace() for seed in range(seeds)]
        budgets = [budget_of(trace, hit_rate) for trace in traces]
        entries += [{"rounds": rounds, "budgets": budgets, **entry} for entry in compare(traces, budgets)]
    return entries


def other_budgets(seeds: int) -> list[dict[str, Any]]:
    """Compare at other budgets, the same for all seeds."""
    traces = [FiveAgents(7, seed).trace() for seed in range(seeds)]
    budgets = (4500, 5500, 6500, 7500, 8500, 9500)
    return [{"budget": budget, **entry} for budget in budgets for entry in compare(traces, [budget] * seeds)]


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    return {"seeds": sizes.seeds, "workflow": workflow(sizes.seeds), "budgets": other_budgets(sizes.few)}
