"""Ranks: the processes of an engine over a model that several compute together (tensor or pipeline parallelism).

The first one leads: it has the requests, schedules and samples. The others hold their part of the keys and values. They
receive each pass, with the changes to the storage since the pass before, and compute their part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hf_parallel.cache import BlockCache, ForwardPass
from hf_parallel.cache.arena import Arena
from hf_parallel.models.decode.adapted_model import AdaptedModel
from hf_parallel.models.ranks import leads, num_ranks

_PATIENCE = timedelta(weeks=52)  # an engine may be idle for long


class Ranks:
    """The processes that compute a model, each of which opens an engine. Does nothing if there is only one.

    Raises `ValueError` if the program has more processes than these.
    """

    def __init__(self, model: Any) -> None:
        count = num_ranks(model)
        self.leads = leads(model)
        self.are_several = count > 1
        self._group: Any = None
        if self.are_several:
            world = distributed.get_world_size()
            if world != count:
                raise ValueError(f"an engine needs all {world} processes for one model, but {count} compute this one")
            self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._changes: list[tuple[bool, str, tuple[Any, ...], int, int | None]] = []
        self._last: ForwardPass | None = None  # sent or received

    def begin(self, arena: Arena) -> None:
        """Record the changes of an arena, whose storage is equal in all processes, from now on."""
        self._changes = []
        self._last = None
        if not self.are_several or not self.leads:
            return
        arena.on_change = self._add
        if arena.quantized is not None:
            arena.quantized.on_change = self._add

    def _add(self, arena: Arena, name: str, arguments: tuple[Any, ...]) -> None:
        self._changes.append((arena.first_slot > 0, name, arguments, arena.num_slots, arena.max_slots))

    def send(self, forward: ForwardPass, ids: torch.Tensor, *arguments: Any) -> None:
        """Let the other processes compute a pass, with the arguments of `AdaptedModel.logits`."""
        if not self.are_several:
            return
        plan = forward.plan
        last = None if self._last is None else self._last.plan
        sent: ForwardPass | None = None
        is_next = last is not None and (last.lineage, last.step + 1) == (plan.lineage, plan.step)
        if not is_next:
            bare_plan = replace(plan, derived={}, windows={})
            sent = replace(forward, plan=bare_plan, position_ids=forward.position_ids.cpu())
        self.broadcast((self._changes, sent, ids.cpu(), *arguments))
        self._changes = []
        self._last = forward

    def run(
        self,
        lead: Callable[[], None],
        cache: BlockCache,
        open_storage: Callable[[], None],
        model: Callable[[], AdaptedModel],
    ) -> None:
        """Run an engine by `lead`, or in other processes than the first, compute what it sends until it ends."""
        if self.leads:
            lead()
        while (received := self.broadcast(None)) is not None:
            if not received:
                open_storage()
                continue
            changes, forward, ids, *arguments = received
            for is_quantized, name, values, *slots in changes:
                arena: Any = cache.pool.arena.quantized if is_quantized else cache.pool.arena
                arena.num_slots, arena.max_slots = slots
                getattr(arena, name)(*values)
            if forward is None and self._last is not None:
                forward = self._last.next_step()
            self._last = forward
            cache.adopt(forward)
            model().logits(forward, ids.to(model().device), *arguments)
            cache.commit()

    def broadcast(self, message: Any) -> Any:
        """Return the message of the first process: a pass, `()` if storage is opened again, None if the engine ends."""
        if not self.are_several:
            return None
        box = [message]
        try:
            distributed.broadcast_object_list(box, 0, self._group)
        except RuntimeError as error:
            raise RuntimeError("a process that computes the model has ended, or cannot be reached") from error
        return box[0]
