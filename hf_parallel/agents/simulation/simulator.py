"""Simulator: a trace of agents through the tree, the eviction and the policies of an engine, without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_parallel.agents.simulation.traces import Trace, TraceRequest
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node
from hf_parallel.engine import Engine
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.policies import (
    ContributionPolicy,
    EvictionPolicy,
    LeastRecentlyUsed,
    StepsToExecution,
    TimeToLive,
)
from hf_parallel.engine.storage import KVStorage
from hf_parallel.generation.validation import check_int

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "contribution": ContributionPolicy,
    "steps": StepsToExecution,
    "ttl": TimeToLive,
}
"""Policies by name."""


@dataclass
class CacheResult:
    """Prompt tokens of a trace that were cached (hits) or computed (misses), in total and for the hotspots.

    A token that no earlier request had is a miss with every policy.
    """

    policy: EvictionPolicy
    """The policy object, with its state at the end."""
    hotspot_hits: int = 0
    hotspot_misses: int = 0
    other_hits: int = 0
    other_misses: int = 0
    evicted_tokens: int = 0
    reused: list[int] = field(default_factory=list)
    """Hits of each request."""
    seconds: float = 0.0
    """Wall-clock time."""

    @property
    def hits(self) -> int:
        """Prompt tokens that were cached."""
        return self.hotspot_hits + self.other_hits

    @property
    def misses(self) -> int:
        """Prompt tokens that were computed."""
        return self.hotspot_misses + self.other_misses

    @property
    def hotspot_hit_rate(self) -> float:
        """Part of the hotspots' prompt tokens that was cached; 0 without any."""
        return self.hotspot_hits / max(self.hotspot_hits + self.hotspot_misses, 1)

    @property
    def other_hit_rate(self) -> float:
        """Part of the other agents' prompt tokens that was cached; 0 without any."""
        return self.other_hits / max(self.other_hits + self.other_misses, 1)

    def _add(self, request: TraceRequest, reused: int) -> None:
        self.reused.append(reused)
        misses = request.prompt_tokens - reused
        if request.is_hotspot:
            self.hotspot_hits, self.hotspot_misses = self.hotspot_hits + reused, self.hotspot_misses + misses
        else:
            self.other_hits, self.other_misses = self.other_hits + reused, self.other_misses + misses


def simulate(
    trace: Trace,
    policy: str | EvictionPolicy = "lru",
    max_tokens: int | None = None,
    *,
    max_batch_tokens: int = 512,
) -> CacheResult:
    """Run a trace without a model, and count hits, misses and evicted tokens.

    The requests run one after the other. The tree, the allocation and the eviction are those of `Engine`, so that the
    figures equal those of an engine with the same budget (see `replay`).

    Parameters
    ----------
    trace : Trace
    policy : str or EvictionPolicy
        "lru", "contribution", "steps", "ttl", or a new policy object.
    max_tokens : int, optional
        Tokens whose keys and values fit into memory. Default: no limit.
    max_batch_tokens : int
        See `Engine`; prompts are computed in parts of this length.

    Raises
    ------
    KVBudgetError
        If a request alone does not fit.
    """
    chosen = _policy(policy)
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, at_least=1)
    check_int("max_batch_tokens", max_batch_tokens, at_least=1)
    began = time.perf_counter()
    storage = KVStorage(None, torch.device("cpu"), max_tokens, chosen)
    storage.set_token_size(1)
    result = CacheResult(chosen)
    for request in _requests(trace, chosen):
        run = _SimulatedRequest(request.hints, len(trace.output_of(request)))
        reused = run.run(storage, trace.prompt_of(request), trace.output_of(request), max_batch_tokens)
        result._add(request, reused)
    result.evicted_tokens, result.seconds = storage.evicted_tokens, time.perf_counter() - began
    return result


def replay(trace: Trace, engine: Engine) -> CacheResult:
    """Run a trace in an engine, with the tokens of the trace as answers, and count what `simulate` counts.

    The engine must be open and idle, and its model must have all token ids of the trace. A `TimeToLive` policy receives
    the time of the trace.
    """
    policy = engine.policy
    before, began = engine.stats.evicted_tokens, time.perf_counter()
    result = CacheResult(policy)
    for request in _requests(trace, policy):
        prompt, output = trace.prompt_of(request), trace.output_of(request)
        handle = engine.submit(
            prompt.tolist(),
            max_new_tokens=len(output),
            min_new_tokens=len(output),
            do_sample=False,
            logits_processor=[_Forced(len(prompt), output)],
            agent_hints=request.hints,
        )
        stats = handle.result().stats
        result._add(request, stats.cached_tokens)
    result.evicted_tokens = engine.stats.evicted_tokens - before
    result.seconds = time.perf_counter() - began
    return result


def _policy(given: str | EvictionPolicy) -> EvictionPolicy:
    if not isinstance(given, str):
        return given
    if given not in POLICIES:
        raise ValueError(f"policy must be one of {list(POLICIES)} or an object, got {given!r}")
    return POLICIES[given]()


def _requests(trace: Trace, policy: EvictionPolicy) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, and set the clock of a policy that has one to the time of the trace."""
    now = 0.0
    if isinstance(policy, TimeToLive):
        policy.clock = lambda: now
    for request in trace.requests:
        now += request.gap
        yield request


@dataclass(eq=False)
class _SimulatedRequest:
    """A request for the storage: a plain completion of one row."""

    hints: AgentHints
    num_tokens: int
    preempted: bool = False
    identity: None = None

    def run(self, storage: KVStorage, prompt: np.ndarray, output: np.ndarray, chunk: int) -> int:
        """Run the request as an engine does. Return the number of prompt tokens that were cached."""
        storage.tree.clock += 1
        cache = SharedPrefixCache(lent=(storage.tree, self))
        leaf = cache.insert(prompt)
        reused = sum(node.num_cached for node in leaf.path)
        self._prefill(storage, cache.nodes_to_prefill(), chunk)
        block = cache.pool.new_block(base=len(prompt))
        while block.length < len(output) - 1:  # the last token is not stored
            cache.pool.reserve([(block, block.length + 1)])
            block.length = min(len(output) - 1, block.extent.capacity - block.first)
        storage.tree.clock += 1
        if block.length:
            cache.add(leaf, output[: block.length], block)
        else:
            cache.pool.free(block)
        storage.tree.unpin(self)
        return reused

    def wait_for_prefix(self, tokens: np.ndarray, root: Node, gap: int) -> None:
        """Do nothing: one request runs at a time."""

    @staticmethod
    def _prefill(storage: KVStorage, nodes: Sequence[Node], chunk: int) -> None:
        """Append the uncached tokens of nodes in passes of at most `chunk` tokens, as `Runner.prefill` does."""
        left = [len(node.uncached) for node in nodes]
        while any(left):
            free, wanted = chunk, []
            for index, node in enumerate(nodes):
                if take := min(left[index], free):
                    assert node.block is not None
                    wanted.append((node.block, node.block.length + take))
                    left[index], free = left[index] - take, free - take
            storage.pool.reserve(wanted)
            for block, length in wanted:
                block.length = length


class _Forced:
    """Logits processor that forces the tokens of a row."""

    def __init__(self, begin: int, tokens: np.ndarray) -> None:
        self.begin, self.tokens = begin, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, int(self.tokens[input_ids.shape[1] - self.begin])] = 0
        return forced
