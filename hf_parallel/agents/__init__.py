"""Agents as coroutines, and supervisors that scale their test-time compute, on the engine (Hive, section 5)."""

from hf_parallel.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
