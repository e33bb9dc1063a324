"""Public names, for type checkers and for `__getattr__` of the package."""

from hf_parallel.engine.engine import Engine as Engine
from hf_parallel.engine.handle import NotRunningError as NotRunningError
from hf_parallel.engine.handle import RequestCancelledError as RequestCancelledError
from hf_parallel.engine.handle import RequestHandle as RequestHandle
from hf_parallel.engine.hints import AgentHints as AgentHints
from hf_parallel.engine.leases import Lease as Lease
from hf_parallel.engine.leases import LeaseTerms as LeaseTerms
from hf_parallel.engine.policies import ContributionPolicy as ContributionPolicy
from hf_parallel.engine.policies import EvictionPolicy as EvictionPolicy
from hf_parallel.engine.policies import LeastRecentlyUsed as LeastRecentlyUsed
from hf_parallel.engine.policies import RequestObserver as RequestObserver
from hf_parallel.engine.policies import SchedulingPolicy as SchedulingPolicy
from hf_parallel.engine.scheduler import QueueFullError as QueueFullError
from hf_parallel.engine.stats import EngineStats as EngineStats
from hf_parallel.engine.storage import KVBudgetError as KVBudgetError
from hf_parallel.engine.storage import WeightsChangedError as WeightsChangedError

__all__: list[str]
