"""EngineStats: the state of an engine, and its work."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hf_parallel.engine.handle import RequestCancelledError
from hf_parallel.engine.scheduler import Scheduler
from hf_parallel.generation.stats import GenerationStats


@dataclass(frozen=True)
class EngineStats:
    """State of an engine, and its work since it started."""

    running: int
    """Requests that generate."""
    waiting: int
    """Requests in the queue, and preempted ones."""
    kv_bytes: int
    """Bytes of keys and values held, cached prefixes included."""
    state_bytes: int
    """Bytes of the states that layers keep instead of keys, cached prefixes included."""
    reserved_bytes: int
    """Bytes of storage reserved for keys, values and states."""
    evicted_tokens: int
    """Tokens of cached prefixes whose keys and values were deleted."""
    preemptions: int
    """Times that a running request lost its keys and values, which were computed again."""
    reused_tokens: int
    """Prompt tokens whose keys and values were cached."""
    prefilled_tokens: int
    """Prompt tokens that were computed."""
    decoded_tokens: int
    """Tokens that were generated."""
    steps: int
    """Forward passes of the model."""
    finished: int
    """Requests that have ended with an output."""
    failed: int
    """Requests that have ended with an error."""
    cancelled: int
    step_seconds: float
    """Seconds in steps."""
    overhead_seconds: float
    """Part of them spent neither in the model nor in the code of the requests."""

    def to_dict(self) -> dict[str, float]:
        """Return the statistics as a plain dictionary."""
        return asdict(self)


@dataclass
class Work:
    """Counts of requests that have ended, and seconds of the steps of an engine."""

    steps: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    """Part of `step_seconds` in forward passes."""
    request_seconds: float = 0.0
    """Part of `step_seconds` in the code of the requests and in sampling."""

    def add(self, cost: GenerationStats, error: BaseException | None) -> None:
        """Count a request that has ended."""
        self.reused_tokens += cost.reused_tokens
        self.prefilled_tokens += cost.prefilled_tokens
        self.decoded_tokens += cost.decoded_tokens
        self.finished += error is None
        self.cancelled += isinstance(error, RequestCancelledError)
        self.failed += error is not None and not isinstance(error, RequestCancelledError)


def engine_stats(scheduler: Scheduler, work: Work, num_submitted: int) -> EngineStats:
    """Return the state of an engine. `num_submitted` requests are not in the scheduler's queue yet."""
    running, storage = list(scheduler.running), scheduler.storage
    preempted = sum(request.preempted for request in running)
    done = asdict(work)
    for name in ("reused_tokens", "prefilled_tokens", "decoded_tokens"):
        done[name] += sum(getattr(request.stats, name) for request in running)
    known = done.pop("model_seconds") + done.pop("request_seconds")
    return EngineStats(
        running=len(running) - preempted,
        waiting=num_submitted + len(scheduler.waiting) + preempted,
        kv_bytes=storage.pool.kv_bytes,
        state_bytes=storage.pool.states.num_used * storage.pool.states.bytes_per_slot,
        reserved_bytes=storage.arena.reserved_bytes + storage.pool.states.reserved_bytes,
        evicted_tokens=storage.evicted_tokens,
        preemptions=scheduler.preemptions,
        # seconds of a step are added at its end, those of its parts before
        overhead_seconds=max(0.0, work.step_seconds - known),
        **done,
    )
