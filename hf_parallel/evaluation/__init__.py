"""Evaluation: tasks of the papers with their grading, and accuracy against budgets of forward passes.

`sweep.sweep` runs a comparison, and `lm_eval` is a backend of lm-evaluation-harness.
"""

from hf_parallel.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
