"""Loads models: by name, from GGUF files, and the demo model."""

from hf_parallel.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
