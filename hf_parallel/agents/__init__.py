"""Agents as coroutines, and supervisors that scale their test-time compute, on the engine (Hive, section 5)."""

from hf_parallel.agents.agent import Agent, agent
from hf_parallel.agents.calls import AgentHandle, cancel, gather, next, now, resume, rng, spawn, tool
from hf_parallel.agents.chat import Chat
from hf_parallel.agents.errors import (
    AgentCancelledError,
    AgentEndedError,
    AgentError,
    BudgetExceededError,
    ReplayError,
    ToolError,
)
from hf_parallel.agents.models import Completion, Model
from hf_parallel.agents.run import AgentStats
from hf_parallel.agents.runtime import AgentResult, Runtime
from hf_parallel.agents.simulation import CacheResult, Trace, TraceRequest, simulate
from hf_parallel.agents.state import State
from hf_parallel.agents.supervisors import (
    BeamSearch,
    BestOfN,
    Fire,
    SelfConsistency,
    SelfRefine,
    Single,
    Supervisor,
    TreeOfThoughts,
)
from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.engine.policies import ContributionPolicy, LeastRecentlyUsed, StepsToExecution

__all__ = [
    "Agent",
    "AgentCancelledError",
    "AgentEndedError",
    "AgentError",
    "AgentHandle",
    "AgentResult",
    "AgentStats",
    "BeamSearch",
    "BestOfN",
    "BudgetExceededError",
    "CacheResult",
    "Chat",
    "Completion",
    "ContributionPolicy",
    "Event",
    "Fire",
    "LeastRecentlyUsed",
    "Model",
    "ReplayError",
    "RunTrace",
    "Runtime",
    "SelfConsistency",
    "SelfRefine",
    "Single",
    "State",
    "StepsToExecution",
    "Supervisor",
    "ToolError",
    "Trace",
    "TraceRequest",
    "TreeOfThoughts",
    "agent",
    "cancel",
    "gather",
    "next",
    "now",
    "resume",
    "rng",
    "simulate",
    "spawn",
    "tool",
]
