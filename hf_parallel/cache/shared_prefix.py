"""`SharedPrefixCache`: a radix tree of token sequences, each stored once (Hydragen, section 3.3)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.cache.base import BlockCache
from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.cache.placement import execution_device
from hf_parallel.cache.pool import Block
from hf_parallel.cache.prefixes import Prefixes
from hf_parallel.cache.tree import Node, PrefixTree
from hf_parallel.kernels import RotarySpec

_lock = threading.Lock()


class SharedPrefixCache(BlockCache):
    """Prompts and completions as a tree of shared prefixes.

    Pass it again as `past_key_values`: prefixes that new prompts share with earlier prompts or completions are not
    computed again.

    Parameters
    ----------
    rotary, device
        See `BlockCache`; neither is needed.
    max_bytes : int, optional
        Maximum bytes of keys, values and states kept between calls. Each call first evicts the least recently used
        nodes, leaves first, until the rest fits. Tokens of the running call are not counted. Default: keep everything
        until `reset()`.
    cache_dtype : str, optional
        See `ParallelConfig`.
    lent : Prefixes, optional
        Prefixes that an engine lends to a request. Default: a tree of the cache's own.

    Examples
    --------
    >>> cache = hf_parallel.SharedPrefixCache()
    >>> model.generate(ids, generation_mode="shared_prefix", past_key_values=cache, num_return_sequences=16)
    >>> model.generate(ids_and_more, generation_mode="shared_prefix", past_key_values=cache)
    """

    def __init__(
        self,
        rotary: Mapping[int, RotarySpec | None] | None = None,
        device: torch.device | str | None = None,
        max_bytes: int | None = None,
        cache_dtype: str | None = None,
        *,
        lent: Prefixes | None = None,
    ) -> None:
        super().__init__(rotary, device, pool=None if lent is None else lent.pool)
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1):
            raise ValueError(f"max_bytes must be a positive int or None, got {max_bytes!r}")
        self.max_bytes = max_bytes
        if lent is None:
            self.pool.arena.cache_dtype = cache_dtype
        self.prefixes = Prefixes(PrefixTree(self.pool)) if lent is None else lent
        self.tree = self.prefixes.tree
        self.filled_by: tuple[str, str] | None = None  # fingerprint and device of the model; None: not known
        self._user: Any = None  # the call that used the cache last

    def begin_call(
        self, model: PreTrainedModel, user: Any = None, kept: bool = True, weights: str | None = None
    ) -> None:
        """Start a call of `model`: check that the cache was filled by it, and evict down to `max_bytes`.

        `user` represents the call: while its `active` is true, no other call can use the cache. `kept` says whether
        the cache outlives the call. If so, the fingerprint of the model is compared: `weights`, or if it is not given
        that of all weights now. Values of offloaded weights do not count.

        Raises
        ------
        ValueError
            If the cache was filled by another model, or before the model's weights, adapters or dropout changed.
        RuntimeError
            If another call uses the cache.
        """
        with _lock:
            if self._user is not None and self._user.active and self._user is not user:
                raise RuntimeError("past_key_values is in use by another call: give each of them a cache of its own")
            self._user = user
        if not self.pool.blocks and not self._has_device:
            self.device = execution_device(model)
        key = (weights or fingerprint(model), str(execution_device(model))) if kept else None
        if kept and key != self.filled_by and any(True for _ in self.tree.nodes()):
            raise ValueError(
                "past_key_values was filled by another model, or before the model's weights changed: reset() it first, "
                "or pass a new cache"
            )
        self.filled_by = key
        self.tree.clock += 1
        self._quantize()  # completions of the last call
        self._evict()

    def record_weights(self, model: PreTrainedModel, weights: str) -> None:
        """Record the fingerprint of the weights that filled the cache, for calls that receive it later."""
        self.filled_by = weights, str(execution_device(model))

    def commit(self) -> None:
        """Confirm that the prepared pass has been computed. With `cache_dtype`, quantize what it has completed."""
        completes = self._pass is not None and not self._pass.is_decode_step  # decode steps complete no node
        super().commit()
        if completes:
            self._quantize()

    def _quantize(self) -> None:
        if self.pool.arena.quantized is not None:
            with suppress(torch.OutOfMemoryError):  # blocks stay as they are
                self.tree.quantize()

    def insert(self, tokens: np.ndarray, root: Node | None = None, gap: int = 0) -> Node:
        """Insert tokens, int64 `[length]`, after `root` (default: the root of the tree). Return the last token's node.

        Reuses nodes of the tree, splits them where necessary, and creates the rest. `gap`: see `Node`. A run of a mode
        calls `generation.decoding.prefill.insert`, which first waits until no other run computes any of them.
        """
        return self.prefixes.insert(tokens, root or self.root, gap)

    def add(self, parent: Node, tokens: np.ndarray, block: Block | None = None) -> Node:
        """Append a node to `parent`, without a search for shared prefixes.

        `block` holds the keys and values of a finished completion; tokens beyond its length are dropped. An empty block
        is freed, and `parent` is returned.
        """
        if block is not None and not block.length:
            self.pool.free(block)
            return parent
        return self.prefixes.add(parent, tokens, block)

    def release(self, nodes: Collection[Node]) -> None:
        """Give up nodes that no row of the call uses any more, children first: free them, or let an engine evict them.

        Nodes that others follow stay.
        """
        self.prefixes.release(nodes)

    def nodes_to_prefill(self) -> list[Node]:
        """Return nodes with uncached tokens, parents before children, and allocate their blocks."""
        return self.prefixes.nodes_to_prefill()

    def discard_uncached(self) -> None:
        """Remove uncached tokens from the tree after a failed prefill."""
        self.prefixes.discard_uncached()

    def end_call(self) -> None:
        """Free blocks that a call has neither attached to the tree nor freed, and remove what it did not compute.

        Blocks of `rows`, which plain forward passes continue, stay.
        """
        self.log = None
        self.pool.on_copy = None
        for block in self.pool.blocks - {node.block for node in self.tree.nodes()}.union(*self.rows):
            self.pool.free(block)
        self.tree.discard_uncached()
        self.tree.discard_nonfinite()

    def reset(self) -> None:
        """Delete everything and release all memory. Prefixes that an engine has lent stay."""
        super().reset()
        self.prefixes.clear()

    @property
    def root(self) -> Node:
        """Root of the prefixes that the cache uses."""
        return self.prefixes.root

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all unique tokens."""
        return self.pool.kv_bytes + sum(map(self.pool.bytes_of, self.prefixes.lent_blocks()))

    @property
    def state_bytes(self) -> int:
        """Bytes of states that layers keep instead of keys."""
        num_lent = sum(block.state >= 0 for block in self.prefixes.lent_blocks())
        return super().state_bytes + num_lent * self.pool.states.bytes_per_slot

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_user": None}

    def _evict(self) -> None:
        """Remove the least recently used nodes, leaves first, until at most `max_bytes` are held."""
        if self.max_bytes is None:
            return
        excess = self.kv_bytes + self.state_bytes - self.max_bytes
        if excess <= 0:
            return
        for _, size in self.tree.evict(lambda node: node.last_used):
            excess -= size
            if excess <= 0:
                return
