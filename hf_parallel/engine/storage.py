"""KVStorage: keys and values of all requests of an engine in one pool with a budget, and the tree of their prefixes.

Nodes of the tree that no running request uses are evicted when the budget is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_parallel.cache.fingerprint import active_adapters, fingerprint
from hf_parallel.cache.placement import all_modules
from hf_parallel.cache.pool import Block, Budget, Wanted
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Owner, RequestObserver
from hf_parallel.engine.leases import Leases
from hf_parallel.engine.policies.base import EvictionPolicy, LeastRecentlyUsed, SchedulingPolicy
from hf_parallel.kernels import RotarySpec

STATE_INTERVAL = 2048
"""Default of an engine: prompts keep a state at least every so many tokens. docs/engine.md compares intervals."""


READ_SHARE = 0.02
"""Share of the time that reads of all weights may take while requests run."""


class KVBudgetError(RuntimeError):
    """Raised if the keys and values of a request do not fit into `max_kv_bytes`."""


class WeightsChangedError(RuntimeError):
    """Raised by a request during which the weights, adapters or dtype of the model changed."""


class KVStorage:
    """The cache over which the passes of all requests run, its budget, and checks of the weights that fill it.

    `max_bytes` bounds the storage of keys and values. `free_memory` is called if it is full and evicting did not
    suffice: it preempts a request and returns True, or returns False if there is none.
    """

    def __init__(
        self,
        rotary: Mapping[int, RotarySpec | None] | None,
        device: torch.device,
        max_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        free_memory: Callable[[], bool] = lambda: False,
        cache_dtype: str | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.free_memory = free_memory
        self.cache = SharedPrefixCache(rotary, device, cache_dtype=cache_dtype)
        self.pool = self.cache.pool
        self.tree = self.cache.tree
        self.arena = self.cache.pool.arena
        self.pool.on_full = self._make_room
        self.policy: EvictionPolicy
        self.use_policy(LeastRecentlyUsed() if policy is None else policy)
        self.leases = Leases(self.tree)
        self.evicted_tokens = 0
        self.has_exceeded = False
        """Whether the request whose code is running is preempted as soon as it wants something; see `exceed`."""
        self._checked: tuple[int, bool] | None = None
        """Step in which the weights were checked, if no pass has run since, and whether all were read."""
        self._versions: list[Any] = []  # see `_versions`, at the last check of all weights
        self._next_read = 0.0
        """Time, of the monotonic clock, from which all weights may be read while requests run."""
        self.epoch = 0
        """Requests share prefixes within an epoch. Another begins where requests finish with keys of old weights."""

    def use_policy(self, policy: EvictionPolicy) -> None:
        """Evict by a policy from now on."""
        if not callable(getattr(policy, "priority", None)):
            raise ValueError(f"policy must have a method priority(node), got {type(policy).__name__}")
        self.policy = policy
        self.scheduling = policy if isinstance(policy, SchedulingPolicy) else None
        """The policy, if it also orders requests."""
        self.tree.observer = policy if isinstance(policy, RequestObserver) else RequestObserver()

    def reset(self) -> None:
        """Delete everything and release all memory."""
        self.cache.reset()
        self.leases.clear()
        self._checked = None
        self._versions = []

    def check_weights(self, model: PreTrainedModel, ending: Any = None) -> None:
        """Raise `WeightsChangedError` if the weights of the model are or were others since the last check.

        Reads all weights if no request runs, except the one that is `ending`. While others run, it compares only what
        PyTorch counts: a write through `Tensor.data` is noticed by the next read of all weights, the last request's at
        the latest. There is one when requests begin, too, unless reads would take more than `READ_SHARE` of the time.
        Requests that begin or end in the same step, between two passes, share one check.
        """
        reads_all = not any(owner.is_request for owner in self.tree.leaves if owner is not ending)
        if ending is None and time.monotonic() >= self._next_read:
            reads_all = True
        if self._checked == (self.tree.clock, True) or self._checked == (self.tree.clock, reads_all):
            return
        is_equal = not self.pool.blocks or _versions(model) == self._versions
        try:
            if is_equal and reads_all:
                self.check_all_weights(model)
        except ValueError:
            is_equal = False
        if not is_equal:
            raise WeightsChangedError(
                "the model's weights changed while the request ran: change them in Engine.updating_weights"
            )
        self._checked = self.tree.clock, reads_all

    def check_all_weights(self, model: PreTrainedModel) -> None:
        """Check that all keys and values were computed with the weights of the model."""
        versions = _versions(model)  # before the values are read: a change meanwhile is noticed
        began = time.monotonic()
        self.cache.begin_call(model)
        ended = time.monotonic()
        self._next_read = ended + (ended - began) / READ_SHARE
        self._versions = versions

    def take_weights(self, model: PreTrainedModel) -> bool:
        """Delete what no running request uses, as the model's weights have changed; accept the new ones.

        Return whether parameters have been replaced by others.
        """
        self.leases.release_all()
        for tokens, _ in self.tree.evict(self.policy.priority):
            self.evicted_tokens += tokens
        before = self._versions
        self._versions = _versions(model)
        self._checked = None
        self.cache.record_weights(model, fingerprint(model))
        return [_identity(version) for version in before] != [_identity(version) for version in self._versions]

    def commit(self) -> None:
        """Confirm that the prepared pass has been computed."""
        self.cache.commit()
        self._checked = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model as of the last check of all weights."""
        assert self.cache.filled_by is not None, "the engine checks all weights when it opens"
        return self.cache.filled_by[0]

    # Budget

    def set_token_size(self, bytes_per_token: int) -> None:
        """Apply the budget, given the bytes of one token over all layers."""
        if self.max_bytes is None:
            return
        state_bytes = self.pool.states.bytes_per_slot
        if self.max_bytes < bytes_per_token + state_bytes:
            and_state = f", and its state {state_bytes}" if state_bytes else ""
            raise ValueError(
                f"max_kv_bytes={self.max_bytes} is less than one token needs: {bytes_per_token} bytes{and_state}"
            )
        quantized = self.arena.quantized
        quantized_bytes = 0 if quantized is None else quantized.bytes_per_token
        self.pool.set_budget(Budget(self.max_bytes, bytes_per_token, state_bytes, quantized_bytes))

    def _make_room(self, wanted: Wanted, slots: int) -> None:
        """Free memory for blocks that grow by moving, evicting or preempting; raise `KVBudgetError` if that fails."""
        pool = self.pool
        budget = self.pool.budget
        assert budget is not None, "memory is full only under a budget"
        needed = budget.cost(slots, pool.new_states(wanted))
        if self.has_exceeded:
            pool.exceed(wanted, slots)
            return
        if pool.defragment(wanted) or self.evict(needed - pool.free_bytes):
            return
        while self.leases.release_next():
            if self.evict(needed - pool.free_bytes):
                return
        if self._drop_states(wanted, needed - pool.free_bytes) or self.free_memory():
            return
        new_tokens = sum(length - block.length for block, length in wanted)
        missing = budget.cost(new_tokens, pool.new_states(wanted))
        raise KVBudgetError(
            f"max_kv_bytes={self.max_bytes}: {budget.held(pool.blocks)} are in use, and {missing} more are needed"
        )

    def exceed(self) -> None:
        """Let the code of a request allocate beyond the budget, until the engine preempts the request.

        It cannot wait for memory where it allocates, in the middle of its own code.
        """
        self.has_exceeded = True

    def evict(self, size: int) -> bool:
        """Evict unused nodes, keys and states, until `size` more bytes are free. Return whether a node was evicted."""
        evicted_tokens = self.evicted_tokens
        target = self.pool.free_bytes + size
        for tokens, _ in self.tree.evict(self.policy.priority):
            self.evicted_tokens += tokens
            if self.pool.free_bytes >= target:
                break
        return self.evicted_tokens > evicted_tokens

    def _drop_states(self, wanted: Wanted, size: int) -> bool:
        """Drop states of the tree that no pass needs now, until `size` more bytes are free. Return whether one was."""
        target = self.pool.free_bytes + size
        has_dropped = False
        for _ in self.tree.drop_states([block for block, _ in wanted]):
            has_dropped = True
            if self.pool.free_bytes >= target:
                break
        return has_dropped

    def used_blocks(self, resumed: Collection[Owner] = ()) -> list[Block]:
        """Return the blocks of the tree that running requests use, or preempted ones of `resumed`.

        Those of leases alone can be freed.
        """
        blocks = []
        for node, owners in self.tree.pins.items():
            requests = [owner for owner in owners if owner.is_request]
            if node.block is not None and any(not owner.preempted or owner in resumed for owner in requests):
                blocks.append(node.block)
        return blocks


def _versions(model: PreTrainedModel) -> list[Any]:
    """Return what changes with the weights and costs little: adapters, and id and version counter of each parameter."""
    # Offloaded parameters are left out: they are replaced at each use. Some rotary embeddings replace buffers, too.
    versions: list[Any] = [str(active_adapters(model))]
    for module in all_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                counter = 0 if parameter.is_inference() else parameter._version
                versions.append((id(parameter), counter))
    return versions


def _identity(version: Any) -> Any:
    """Return the id of a parameter, of an element of `_versions`; adapters as they are."""
    return version[0] if isinstance(version, tuple) else version
