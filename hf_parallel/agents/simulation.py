"""Simulation: agents' requests through an engine's prefix tree, allocation and eviction, without a model."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch

from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.policies import ContributionPolicy, EvictionPolicy, LeastRecentlyUsed, StepsToExecution
from hf_parallel.engine.scheduler import BATCH_TOKENS
from hf_parallel.engine.storage import KVStorage
from hf_parallel.generation.validation import check_choice, check_int

PromptSegment: TypeAlias = tuple[str, int] | list[str | int]
"""Part of a prompt: token ids, or a name and a length. Equal names stand for equal tokens."""
POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "contribution": ContributionPolicy,
    "steps": StepsToExecution,
}
"""Policies by name."""


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace. `dataclasses.asdict` makes JSON of it, and `TraceRequest(**fields)` reads it.

    Parameters
    ----------
    agent : str
        Role of the agent, the `agent_id` of its hints.
    prompt : sequence of segments
        Parts of the prompt: a name and a number of tokens, or a list of token ids.
    output : segment
        Generated tokens, at least one.
    workflow : str
        The `workflow_id` of its hints.
    is_hotspot : bool
        Whether the agent is a hotspot, for the counts of hits and misses.
    """

    agent: str
    prompt: Sequence[PromptSegment]
    output: PromptSegment
    workflow: str = ""
    is_hotspot: bool = False

    @property
    def hints(self) -> AgentHints:
        """Hints of the request for the engine."""
        return AgentHints(self.workflow, self.agent)


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they run, one after the other.

    Parameters
    ----------
    requests : sequence of TraceRequest
    vocabulary : tuple of int
        Range of the token ids of named segments: from the first number, below the second.
    """

    requests: Sequence[TraceRequest]
    vocabulary: tuple[int, int] = (3, 32000)

    def prompt_of(self, request: TraceRequest) -> np.ndarray:
        """Return the token ids of a prompt, int64 `[length]`."""
        return np.concatenate([self._tokens(segment) for segment in request.prompt])

    def output_of(self, request: TraceRequest) -> np.ndarray:
        """Return the generated token ids, int64 `[length]`."""
        return self._tokens(request.output)

    def _tokens(self, segment: PromptSegment) -> np.ndarray:
        if not segment or not isinstance(segment[0], str):
            return np.array(segment, np.int64)
        check_int(f"length of segment {segment[0]!r}", segment[1], at_least=1)
        return _named_tokens(segment[0], int(segment[1]), *self.vocabulary)


@lru_cache(maxsize=4096)
def _named_tokens(name: str, length: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(low, high, length, dtype=np.int64)


@dataclass
class CacheResult:
    """Cached (hits) and computed (misses) prompt tokens of a trace, for hotspots and other agents.

    A token that no earlier request had is a miss under every policy.
    """

    policy: EvictionPolicy
    """The policy in its final state."""
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
    def hotspot_hit_rate(self) -> float:
        """Cached fraction of the hotspots' prompt tokens; 0 if there are none."""
        return self.hotspot_hits / max(self.hotspot_hits + self.hotspot_misses, 1)

    @property
    def other_hit_rate(self) -> float:
        """Cached fraction of the other agents' prompt tokens; 0 if there are none."""
        return self.other_hits / max(self.other_hits + self.other_misses, 1)

    def add(self, request: TraceRequest, prompt_tokens: int, reused: int) -> None:
        """Count a request."""
        self.reused.append(reused)
        if request.is_hotspot:
            self.hotspot_hits += reused
            self.hotspot_misses += prompt_tokens - reused
        else:
            self.other_hits += reused
            self.other_misses += prompt_tokens - reused


def simulate(trace: Trace, policy: str | EvictionPolicy = "lru", max_tokens: int | None = None) -> CacheResult:
    """Run a trace without a model, and count hits, misses and evicted tokens.

    Requests run one after the other, with the prefix tree, allocation and eviction of `Engine`. The counts equal those
    of an engine with the same budget.

    Parameters
    ----------
    trace : Trace
    policy : str or EvictionPolicy
        "lru", "contribution", "steps", or a new policy object.
    max_tokens : int, optional
        Budget of the KV cache in tokens. Default: no limit.

    Raises
    ------
    KVBudgetError
        If a request alone does not fit.
    """
    if isinstance(policy, str):
        check_choice("policy", policy, list(POLICIES))
        policy = POLICIES[policy]()
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, at_least=1)
    began = time.perf_counter()
    storage = KVStorage(None, torch.device("cpu"), max_tokens, policy)
    storage.set_token_size(1)
    result = CacheResult(policy)
    for request in trace.requests:
        prompt, output = trace.prompt_of(request), trace.output_of(request)
        reused = _SimulatedRequest(request.hints, len(output)).run(storage, prompt, output)
        result.add(request, len(prompt), reused)
    result.evicted_tokens, result.seconds = storage.evicted_tokens, time.perf_counter() - began
    return result


@dataclass(eq=False)
class _SimulatedRequest:
    """A request as the storage sees it: one row, without a mode."""

    hints: AgentHints
    num_tokens: int
    preempted: bool = False
    identity: None = None

    def run(self, storage: KVStorage, prompt: np.ndarray, output: np.ndarray) -> int:
        """Run the request as an engine would. Return the number of cached prompt tokens."""
        storage.tree.clock += 1
        cache = SharedPrefixCache(lent=(storage.tree, self))
        leaf = cache.insert(prompt)
        reused = sum(node.num_cached for node in leaf.path)
        self._prefill(storage, cache.nodes_to_prefill(), BATCH_TOKENS["cpu"])
        block = cache.pool.new_block(base=len(prompt))
        while block.length < len(output) - 1:  # the keys of the last token are never computed
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
