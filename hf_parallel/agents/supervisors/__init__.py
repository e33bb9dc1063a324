"""Supervisors: test-time scaling algorithms that know nothing of the agents they supervise."""

from hf_parallel.agents.supervisors.base import Fire, Supervisor
from hf_parallel.agents.supervisors.beam_search import BeamSearch
from hf_parallel.agents.supervisors.best_of_n import BestOfN
from hf_parallel.agents.supervisors.self_consistency import SelfConsistency
from hf_parallel.agents.supervisors.single import Single
from hf_parallel.agents.supervisors.tree_of_thoughts import TreeOfThoughts

__all__ = ["BeamSearch", "BestOfN", "Fire", "SelfConsistency", "Single", "Supervisor", "TreeOfThoughts"]
