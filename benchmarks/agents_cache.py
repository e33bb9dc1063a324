"""Compares eviction policies on traces of agents (Hive, section 8.3), simulated: the same figures on every machine.

- `workflow`: the five agents of the paper, in 7 and 21 rounds, at the budget where LRU has the hotspot hit rate of the
  paper's baseline: 0.903 and 0.935. Beside the policies of the package are `score`, the paper's order of eviction
  (section 7.2), `steps`, that of KVFlow, and `ttl`, a time to live.
- `alphas`: the same with other weights of the intrinsic utility in the contribution score.
- `scores`: the scores of the agents over time (figure 9).
- `budgets`: the same with other budgets.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_parallel.engine import ContributionPolicy, LeastRecentlyUsed
from hf_parallel.progress import progress_bar

from .cache_policies import OwnerScore, StepsToExecution, TimedHints, TimeToLive
from .cache_simulation import TraceRequest, named_tokens, simulate

POLICIES: dict[str, Any] = {"lru": LeastRecentlyUsed, "contribution": ContributionPolicy}
OTHERS: dict[str, Any] = {"score": OwnerScore, "steps": StepsToExecution, "ttl": TimeToLive}
"""Policies of papers that are not in the package."""
ALPHAS: dict[str, Any] = {str(alpha): partial(ContributionPolicy, alpha) for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
AGENTS = ("Decision", "Patcher", "Viewer", "Summary", "Searcher")
HOTSPOTS = ("Patcher", "Viewer")
PAPER = {7: 0.903, 21: 0.935}
"""Hit rate of the hotspots with LRU in the paper, by rounds."""
GRID = 100
"""Step between tried budgets, in tokens."""
BUDGETS = (4500, 5500, 6500, 7500, 8500, 9500)
SIZES, QUICK = {"seeds": 10, "few": 5}, {"seeds": 1, "few": 1}
"""Traces of `workflow`, and of `alphas` and `budgets`."""


@dataclass(frozen=True)
class Request(TraceRequest):
    """A request of the workflow. `begins`: seconds since the first one. `tool_seconds`: of the tool that it calls."""

    is_hotspot: bool = False
    begins: float = 0.0
    tool_seconds: float | None = None

    @property
    def hints(self) -> TimedHints:
        return TimedHints(self.workflow, self.agent, self.begins, self.tool_seconds)


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
    tool_seconds: float = 5.0  # of the tools that Viewer and Patcher wait for between two turns
    is_changing: bool = False
    vocabulary: tuple[int, int] = (3, 32000)

    def trace(self) -> list[Request]:
        """Return the requests in the order in which they run."""
        rng = random.Random(self.seed)
        requests: list[Request] = []
        name = f"five agents, seed {self.seed}"

        def length(mean: int) -> int:
            return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

        def part(what: str, mean: int) -> list[int]:
            return named_tokens(f"{name}: {what}", length(mean), self.vocabulary)

        task = part("task", self.task)
        roles = {agent: part(agent, self.role) for agent in AGENTS}
        code = {agent: part(f"code of {agent}", self.code) for agent in HOTSPOTS}
        parts = {agent: agent for agent in AGENTS}  # agent by part
        kept: list[int] = []  # the summary of the rounds so far

        def add(agent: str, prompt: list[int], answer: int, tool_seconds: float | None = None) -> list[int]:
            output = part(f"answer {len(requests)}", answer)
            begins = (requests[-1].begins if requests else 0.0) + rng.uniform(0.5, 2.0)
            request = Request(
                agent=parts[agent],
                prompt=task + roles[agent] + prompt,
                output=output,
                workflow=name,
                is_hotspot=agent in HOTSPOTS,
                begins=begins,
                tool_seconds=tool_seconds,
            )
            requests.append(request)
            return output

        def decide(where: str) -> None:
            add("Decision", part(f"state {where}", self.report), self.message)

        for number in range(self.rounds):
            if self.is_changing and number == self.rounds // 2:
                parts |= {"Viewer": "Searcher", "Searcher": "Viewer", "Patcher": "Summary", "Summary": "Patcher"}
            talks: dict[str, list[int]] = {"Viewer": [], "Patcher": []}
            for loop in range(self.loops):
                decide(f"{number}.{loop}")
                waits = self.tool_seconds if loop + 1 < self.loops else None
                for agent, talk in talks.items():
                    talk += part(f"message {number}.{loop} {agent}", self.message)
                    talk += add(agent, code[agent] + kept + talk, self.answer, waits)
            decide(f"{number} search")
            documents = part(f"documents {number}", self.documents)
            add("Searcher", documents, self.message)
            kept = add("Summary", kept + part(f"report {number}", self.report) + documents, self.summary)
        return requests


def load(options: Any) -> tuple[None, None]:
    """Load nothing."""
    return None, None


def measure(trace: Sequence[Request], budget: int | None, policy: Any = None) -> dict[str, float]:
    """Return hit rates, misses, computed (stored) and evicted tokens. A token without an earlier request is a miss."""
    found, counts = simulate(trace, policy, budget), defaultdict[str, float](float)
    for request, reused in zip(trace, found.reused, strict=True):
        who, computed = "hotspot" if request.is_hotspot else "other", len(request.prompt) - reused
        counts[f"{who}_hits"] += reused
        counts[f"{who}_misses"] += computed
        counts["stored_tokens"] += computed + len(request.output) - 1
    for who in ("hotspot", "other"):
        counts[f"{who}_hit_rate"] = counts[f"{who}_hits"] / (counts[f"{who}_hits"] + counts[f"{who}_misses"])
    return {**counts, "evicted_tokens": found.evicted_tokens}


def budget_of(trace: Sequence[Request], hit_rate: float) -> int:
    """Return the budget at which LRU's hotspot hit rate is nearest to a given one."""
    longest = max(len(one.prompt) + len(one.output) for one in trace)
    enough = -(-longest // GRID) * GRID
    while measure(trace, enough)["hotspot_hit_rate"] < hit_rate:
        enough += 5 * GRID
    near = range(max(enough - 9 * GRID, longest), enough + 2 * GRID, GRID)
    return min(near, key=lambda budget: abs(measure(trace, budget)["hotspot_hit_rate"] - hit_rate))


def compare(
    traces: Sequence[Sequence[Request]], budgets: Sequence[int], policies: Mapping[str, Any] = POLICIES
) -> list[dict[str, Any]]:
    """Return means over traces for each policy and without a limit (`unlimited`), with the spread of ratios to LRU.

    Any policy evicts the tokens that exceed the budget. In `unlimited`, `fewer_evicted` compares LRU with this minimum.
    """
    entries: list[dict[str, Any]] = []
    lru = [measure(*pair) for pair in zip(traces, budgets, strict=True)]
    compared = {"unlimited": LeastRecentlyUsed, **policies}.items()
    for name, policy in progress_bar(compared, what="Simulated caches", unit="policies"):
        found, fewer = [], dict[str, list[float]](fewer_misses=[], fewer_evicted=[])
        for trace, budget, base in zip(traces, budgets, lru, strict=True):
            one = measure(trace, None if name == "unlimited" else budget, policy())
            evicted = one["evicted_tokens"] or one["stored_tokens"] - budget
            fewer["fewer_misses"].append(1 - one["hotspot_misses"] / base["hotspot_misses"])
            fewer["fewer_evicted"].append(base["evicted_tokens"] / max(evicted, 1))
            found.append(one)
        means = {key: statistics.mean(one[key] for one in found) for key in found[0]}
        spread = {key: {"mean": statistics.mean(v), "least": min(v), "most": max(v)} for key, v in fewer.items()}
        entries.append({"policy": name, **means, **spread})
    return entries


def workflow(seeds: int, policies: Mapping[str, Any] = POLICIES) -> list[dict[str, Any]]:
    """Compare policies on the workflow of the paper."""
    entries = []
    for rounds, hit_rate in PAPER.items():
        traces = [FiveAgents(rounds, seed).trace() for seed in range(seeds)]
        budgets = [budget_of(trace, hit_rate) for trace in traces]
        entries += [{"rounds": rounds, "budgets": budgets, **entry} for entry in compare(traces, budgets, policies)]
    return entries


def scores() -> dict[str, list[float]]:
    """Return the contribution scores of the agents in one trace of 7 rounds; 0 before an agent's first request."""
    trace, policy = FiveAgents().trace(), ContributionPolicy()
    measure(trace, budget_of(trace, PAPER[7]), policy)
    return {agent: [one[agent].score if agent in one else 0.0 for one in policy.scores.history] for agent in AGENTS}


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    traces = [FiveAgents(7, seed).trace() for seed in range(sizes.few)]
    others = [{"budget": size, **entry} for size in BUDGETS for entry in compare(traces, [size] * len(traces))]
    return {
        "seeds": sizes.seeds,
        "workflow": workflow(sizes.seeds, POLICIES | OTHERS),
        "alphas": workflow(sizes.few, ALPHAS),
        "scores": scores(),
        "budgets": others,
    }
