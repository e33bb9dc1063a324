"""Several workflows of agents at once in an engine with little memory: who runs first, and who is preempted.

Each workflow has the five agents of `agents_cache`, and sends its next request when the last one has ended. A model of
random weights computes them; answers are those of the trace. There are three ways, which take turns:

- `lru`: requests in the order in which they arrive; the least recently used prefix is evicted.
- `eviction`: contribution scores decide what is evicted, as in the paper (Hive, section 7.2).
- `contribution`: they also decide which requests are admitted first and preempted last (`ContributionPolicy`).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.engine import ContributionPolicy, Engine, LeastRecentlyUsed
from hf_parallel.progress import progress_bar

from .agents_cache import FiveAgents, Request

SIZES = {"seeds": 4, "workflows": 10, "rounds": 1, "rows": 8, "budget": 2500}
QUICK = {"seeds": 1, "workflows": 2, "rounds": 1, "rows": 1, "budget": 1500}
"""`rows`: rows of a step at most. `budget`: tokens that fit into memory."""
LENGTHS: dict[str, Any] = {
    "loops": 3,
    "code": 300,
    "documents": 300,
    "summary": 60,
    "answer": 90,
    "vocabulary": (3, 250),
}
"""Shorter prompts than those of the simulation, so that a model computes them in minutes."""


class EvictionAlone(ContributionPolicy):
    """The policy without a say in which requests run."""

    def contribution(self, request: Any) -> float:
        return 0.0


WAYS: dict[str, Any] = {"lru": LeastRecentlyUsed, "eviction": EvictionAlone, "contribution": ContributionPolicy}


def load(options: Any) -> tuple[Any, None]:
    """Return a model of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
    )
    return LlamaForCausalLM(config).eval(), None


def token_bytes(model: Any) -> int:
    """Return the bytes of the keys and values of a token."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


async def run_workflow(engine: Engine, trace: Sequence[Request]) -> int:
    """Run the requests of a workflow one after the other; return the step of the engine in which the last one ended."""
    for request in trace:
        handle = engine.submit(
            request.prompt,
            logits_processor=[_force(request)],
            agent_hints=request.hints,
            max_new_tokens=len(request.output),
            min_new_tokens=len(request.output),
            do_sample=False,
        )
        await handle.result_async()
    return engine.stats.steps


def _force(request: Request) -> Any:
    """Return a logits processor that leaves the answer of the trace alone."""

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, request.output[input_ids.shape[1] - len(request.prompt)]] = 0
        return forced

    return force


def measure(model: Any, traces: Sequence[Sequence[Request]], policy: Any, rows: int, budget: int) -> dict[str, float]:
    """Run workflows at once; return the engine's work, and the steps after which workflows ended, as a mean."""

    async def run_all(engine: Engine) -> list[int]:
        return await asyncio.gather(*(run_workflow(engine, trace) for trace in traces))

    began = time.perf_counter()
    with Engine(model, max_kv_bytes=budget * token_bytes(model), max_rows=rows, policy=policy) as engine:
        ends = asyncio.run(run_all(engine))
        stats = engine.stats
    return {
        "steps": stats.steps,
        "mean_end": statistics.mean(ends),
        "computed_tokens": stats.prefilled_tokens + stats.decoded_tokens,
        "evicted_tokens": stats.evicted_tokens,
        "preemptions": stats.preemptions,
        "seconds": time.perf_counter() - began,
    }


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report: means of each way, and ratios to `lru` by seed."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in progress_bar(range(sizes.seeds), what="Workflows in an engine", unit="seeds"):
        numbers = range(seed * sizes.workflows, (seed + 1) * sizes.workflows)
        traces = [FiveAgents(sizes.rounds, number, **LENGTHS).trace() for number in numbers]
        for way, policy in WAYS.items():
            runs[way].append(measure(model, traces, policy(), sizes.rows, sizes.budget))
    names = list(runs["lru"][0])
    ways = {way: {name: statistics.mean(one[name] for one in found) for name in names} for way, found in runs.items()}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for way, found in runs.items():
        ratios[way] = {}
        for name in names:
            by_seed = [base[name] / max(one[name], 1e-9) for base, one in zip(runs["lru"], found, strict=True)]
            ratios[way][name] = {"mean": statistics.mean(by_seed), "least": min(by_seed), "most": max(by_seed)}
    return {"seeds": sizes.seeds, "ways": ways, "fewer_than_lru": ratios}
