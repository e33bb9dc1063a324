"""EngineStats: the state of an engine, and its work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from hf_parallel.engine.handle import RequestCancelledError
from hf_parallel.engine.scheduler import Scheduler
from hf_parallel.generation.stats import GenerationStats

_TOKENS = ("reused_tokens", "prefilled_tokens", "decoded_tokens", "replayed_tokens")


@dataclass
class EngineStats:
    """State of an engine, and its work since it started."""

    running: int = 0
    """Requests that are generating."""
    waiting: int = 0
    """Requests in the queue, and preempted ones."""
    kv_bytes: int = 0
    """Bytes of keys and values held, cached prefixes included."""
    state_bytes: int = 0
    """Bytes of recurrent states, cached prefixes included."""
    reserved_bytes: int = 0
    """Bytes of storage reserved for keys, values and states."""
    leases: int = 0
    """Finished requests whose prefixes stay cached for forks."""
    lease_bytes: int = 0
    """Bytes of keys, values and states that leases keep."""
    evicted_tokens: int = 0
    """Tokens of cached prefixes whose keys and values were deleted."""
    preemptions: int = 0
    """Number of times that a running request was preempted and recomputed."""
    reused_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    prefilled_tokens: int = 0
    """Prompt tokens that were prefilled."""
    decoded_tokens: int = 0
    """Tokens that were generated."""
    replayed_tokens: int = 0
    """Generated tokens that were sampled from the logits of a `LogitsCache`."""
    steps: int = 0
    """Forward passes of the model."""
    finished: int = 0
    """Requests that have ended with an output."""
    failed: int = 0
    """Requests that have ended with an error."""
    cancelled: int = 0
    step_seconds: float = 0.0
    """Seconds in steps."""
    overhead_seconds: float = 0.0
    """Seconds in steps that were spent neither in the model nor in the code of the requests."""

    def to_dict(self) -> dict[str, float]:
        """Return the statistics as a plain dictionary."""
        return asdict(self)

    def add(self, cost: GenerationStats, error: BaseException | None) -> None:
        """Count a request that has ended."""
        for name in _TOKENS:
            setattr(self, name, getattr(self, name) + getattr(cost, name))
        if error is None:
            self.finished += 1
        elif isinstance(error, RequestCancelledError):
            self.cancelled += 1
        else:
            self.failed += 1


def engine_stats(scheduler: Scheduler, work: EngineStats, num_submitted: int) -> EngineStats:
    """Return the state of an engine, given its work. `num_submitted` requests are not in the scheduler's queue yet."""
    running = list(scheduler.running)
    storage = scheduler.storage
    preempted = sum(request.preempted for request in running)
    states = storage.pool.states
    tokens = {name: getattr(work, name) for name in _TOKENS}
    for request in running:
        for name in _TOKENS:
            tokens[name] += getattr(request.stats, name)
    return replace(
        work,
        running=len(running) - preempted,
        waiting=num_submitted + len(scheduler.waiting) + preempted,
        kv_bytes=storage.pool.kv_bytes,
        state_bytes=states.num_used * states.bytes_per_slot,
        reserved_bytes=storage.arena.reserved_bytes + states.reserved_bytes,
        leases=storage.leases.count,
        lease_bytes=storage.leases.num_bytes,
        evicted_tokens=storage.evicted_tokens,
        preemptions=scheduler.preemptions,
        **tokens,
    )
