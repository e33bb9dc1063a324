"""Training on data that is laid out as inference lays it out (docs/training.md). Names import TRL when used."""

from hf_parallel.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
