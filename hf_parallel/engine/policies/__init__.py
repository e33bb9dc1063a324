"""Policies: the order in which an engine evicts cached prefixes."""

from hf_parallel.cache.tree import RequestObserver
from hf_parallel.engine.policies.base import EvictionPolicy, LeastRecentlyUsed
from hf_parallel.engine.policies.contribution import Contribution, ContributionPolicy, ContributionScores

__all__ = [
    "Contribution",
    "ContributionPolicy",
    "ContributionScores",
    "EvictionPolicy",
    "LeastRecentlyUsed",
    "RequestObserver",
]
