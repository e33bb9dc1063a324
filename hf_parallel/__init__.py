"""Parallel generation over a shared KV cache, for Hugging Face Transformers."""

from hf_parallel import hub, pipelines
from hf_parallel.cache import BlockCache
from hf_parallel.cache.hogwild import HogwildCache
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree_branch import TreeBranchCache
from hf_parallel.generation import (
    CHAIN_OF_DRAFT,
    ConsoleStreamer,
    GenerationStats,
    ParallelConfig,
    ParallelIteratorStreamer,
    ParallelOutput,
    ParallelStreamer,
    build_prompt,
    chain_of_draft_prompt,
    disable,
    enable,
    generate,
    is_enabled,
    modes,
)
from hf_parallel.generation.modes import *  # noqa: F403
from hf_parallel.generation.replay import Hotspot, ReplayPolicy, Stepwise
from hf_parallel.kernels import Backend, backends
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.models.embedded import load_embedded_model
from hf_parallel.pipelines import ParallelTextGenerationPipeline

__version__ = "0.1.0"

__all__ = [
    "CHAIN_OF_DRAFT",
    "Backend",
    "BlockCache",
    "ConsoleStreamer",
    "GenerationStats",
    "HogwildCache",
    "Hotspot",
    "LogitsCache",
    "ParallelConfig",
    "ParallelIteratorStreamer",
    "ParallelOutput",
    "ParallelStreamer",
    "ParallelTextGenerationPipeline",
    "ReplayPolicy",
    "SharedPrefixCache",
    "Stepwise",
    "TreeBranchCache",
    "UnsupportedModelError",
    "backends",
    "build_prompt",
    "chain_of_draft_prompt",
    "disable",
    "enable",
    "generate",
    "is_enabled",
    "hub",
    "load_embedded_model",
]
__all__ += modes.__all__


def __dir__() -> list[str]:
    return ["__version__", *__all__]


pipelines.register()
