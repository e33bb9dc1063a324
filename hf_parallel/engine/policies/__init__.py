"""Policies: the order in which an engine evicts cached prefixes, also by the agents that use them."""

from hf_parallel.cache.tree import RequestObserver
from hf_parallel.engine.policies.base import EvictionPolicy, LeastRecentlyUsed
from hf_parallel.engine.policies.contribution import ContributionPolicy
from hf_parallel.engine.policies.scores import Contribution, ContributionScores
from hf_parallel.engine.policies.steps import StepsToExecution
from hf_parallel.engine.policies.time_to_live import TimeToLive

__all__ = [
    "Contribution",
    "ContributionPolicy",
    "ContributionScores",
    "EvictionPolicy",
    "LeastRecentlyUsed",
    "RequestObserver",
    "StepsToExecution",
    "TimeToLive",
]
