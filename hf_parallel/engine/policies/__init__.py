"""Policies: which cached prefixes an engine evicts first, and which requests it runs first."""

from hf_parallel.cache.tree import RequestObserver
from hf_parallel.engine.policies.base import EvictionPolicy, LeastRecentlyUsed, SchedulingPolicy
from hf_parallel.engine.policies.contribution import Contribution, ContributionPolicy, ContributionScores

__all__ = [
    "Contribution",
    "ContributionPolicy",
    "ContributionScores",
    "EvictionPolicy",
    "LeastRecentlyUsed",
    "RequestObserver",
    "SchedulingPolicy",
]
