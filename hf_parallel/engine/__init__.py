"""Many concurrent callers on one model: continuous batching of all modes over one KV cache with a budget."""

from hf_parallel.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
