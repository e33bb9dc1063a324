"""Supervisors: test-time scaling algorithms that know nothing of the agents they supervise."""

from hf_parallel.agents.supervisors.base import Fire, Supervisor
from hf_parallel.agents.supervisors.single import Single

__all__ = ["Fire", "Single", "Supervisor"]
