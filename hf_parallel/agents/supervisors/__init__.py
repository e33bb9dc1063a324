"""Supervisors: test-time scaling algorithms, independent of the agents that they supervise."""

from hf_parallel.agents.supervisors.base import Supervisor
from hf_parallel.agents.supervisors.paths import BestOfN, SelfConsistency, Single
from hf_parallel.agents.supervisors.searches import BeamSearch, TreeOfThoughts

__all__ = ["BeamSearch", "BestOfN", "SelfConsistency", "Single", "Supervisor", "TreeOfThoughts"]
