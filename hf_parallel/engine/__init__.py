"""Many concurrent callers on one model: continuous batching of all modes over one KV cache with a budget."""

from hf_parallel.engine.engine import Engine
from hf_parallel.engine.handle import RequestCancelledError, RequestHandle
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.policies import (
    ContributionPolicy,
    EvictionPolicy,
    LeastRecentlyUsed,
    RequestObserver,
    StepsToExecution,
)
from hf_parallel.engine.scheduler import QueueFullError
from hf_parallel.engine.stats import EngineStats
from hf_parallel.engine.storage import KVBudgetError, WeightsChangedError

__all__ = [
    "AgentHints",
    "ContributionPolicy",
    "Engine",
    "EngineStats",
    "EvictionPolicy",
    "KVBudgetError",
    "LeastRecentlyUsed",
    "QueueFullError",
    "RequestCancelledError",
    "RequestHandle",
    "RequestObserver",
    "StepsToExecution",
    "WeightsChangedError",
]
