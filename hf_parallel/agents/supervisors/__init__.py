"""Supervisors: test-time scaling algorithms, independent of the agents that they supervise."""

from hf_parallel.agents.supervisors.base import Fire, Supervisor
from hf_parallel.agents.supervisors.beam_search import BeamSearch
from hf_parallel.agents.supervisors.best_of_n import BestOfN
from hf_parallel.agents.supervisors.dvts import DVTS
from hf_parallel.agents.supervisors.mcts import MCTS
from hf_parallel.agents.supervisors.self_consistency import SelfConsistency
from hf_parallel.agents.supervisors.self_refine import SelfRefine
from hf_parallel.agents.supervisors.single import Single
from hf_parallel.agents.supervisors.tree_of_thoughts import TreeOfThoughts
from hf_parallel.agents.supervisors.tree_quest import TreeQuest

__all__ = [
    "DVTS",
    "MCTS",
    "BeamSearch",
    "BestOfN",
    "Fire",
    "SelfConsistency",
    "SelfRefine",
    "Single",
    "Supervisor",
    "TreeOfThoughts",
    "TreeQuest",
]
