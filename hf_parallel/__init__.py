"""Parallel generation over a shared KV cache, for Hugging Face Transformers."""

from hf_parallel.attention import UnsupportedModelError
from hf_parallel.cache import BlockCache
from hf_parallel.cache.hogwild import HogwildCache
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.embedded import load_embedded_model
from hf_parallel.generation import (
    GenerationStats,
    HogwildConfig,
    HogwildOutput,
    ParallelConfig,
    ParallelOutput,
    ParallelStreamer,
    SharedPrefixConfig,
    Step,
    disable,
    enable,
    hogwild_prompt,
)

__version__ = "0.1.0"

__all__ = [
    "BlockCache",
    "GenerationStats",
    "HogwildCache",
    "HogwildConfig",
    "HogwildOutput",
    "ParallelConfig",
    "ParallelOutput",
    "ParallelStreamer",
    "SharedPrefixCache",
    "SharedPrefixConfig",
    "Step",
    "UnsupportedModelError",
    "disable",
    "enable",
    "hogwild_prompt",
    "load_embedded_model",
]
