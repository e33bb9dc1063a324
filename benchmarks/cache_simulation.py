"""Simulation: agents' requests through an engine's prefix tree, allocation and eviction, without a model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.lent_prefixes import LentPrefixes
from hf_parallel.engine.policies import EvictionPolicy
from hf_parallel.engine.scheduler import BATCH_TOKENS
from hf_parallel.engine.storage import KVStorage
from hf_parallel.generation.validation import check_int


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace.

    Parameters
    ----------
    agent : str
        Role of the agent, the `agent_id` of its hints.
    prompt, output : sequence of int
        Token ids of the prompt, and of the answer, at least one.
    workflow : str
        The `workflow_id` of its hints.
    """

    agent: str
    prompt: Sequence[int]
    output: Sequence[int]
    workflow: str = ""

    @property
    def hints(self) -> AgentHints:
        """The hints that policies receive."""
        return AgentHints(self.workflow, self.agent)


@dataclass(frozen=True)
class CacheResult:
    """Cached prompt tokens of each request of a trace, and the tokens that were evicted in all."""

    reused: list[int]
    evicted_tokens: int


def named_tokens(name: str, length: int, vocabulary: tuple[int, int] = (3, 32000)) -> list[int]:
    """Return token ids that stand for a part of a prompt, such as a file: random, the same for the same name.

    `vocabulary`: from the first id, below the second.
    """
    return np.random.default_rng(zlib.crc32(name.encode())).integers(*vocabulary, length).tolist()


def simulate(
    requests: Sequence[TraceRequest], policy: EvictionPolicy | None = None, max_tokens: int | None = None
) -> CacheResult:
    """Run a trace without a model, and count cached and evicted tokens.

    Requests run one after the other, with the prefix tree, allocation and eviction of `Engine`. The counts equal those
    of an engine with the same budget.

    Parameters
    ----------
    requests : sequence of TraceRequest
    policy : EvictionPolicy, optional
        A new policy. Default: `LeastRecentlyUsed()`.
    max_tokens : int, optional
        Budget of the KV cache in tokens. Default: no limit.

    Raises
    ------
    KVBudgetError
        If a request alone does not fit.
    """
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, at_least=1)
    storage = KVStorage(None, torch.device("cpu"), max_tokens, policy)
    storage.set_token_size(1)
    reused = [_SimulatedRequest(request).run(storage, request) for request in requests]
    return CacheResult(reused, storage.evicted_tokens)


class _SimulatedRequest:
    """A request as the storage sees it: one row, without a mode."""

    preempted = False
    identity = None
    reads = ()
    is_request = True

    def __init__(self, request: TraceRequest) -> None:
        self.hints = request.hints
        self.num_tokens = len(request.output)

    def run(self, storage: KVStorage, request: TraceRequest) -> int:
        """Run the request as an engine would. Return the number of cached prompt tokens."""
        prompt, output = (np.array(tokens, np.int64) for tokens in (request.prompt, request.output))
        storage.tree.clock += 1
        cache = SharedPrefixCache(lent=LentPrefixes(storage.tree, None, self))
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
