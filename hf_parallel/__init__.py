"""Parallel generation over a shared KV cache, for Hugging Face Transformers."""

from transformers import AutoModelForCausalLM
from transformers.pipelines import PIPELINE_REGISTRY

from hf_parallel import hub
from hf_parallel.cache import BlockCache
from hf_parallel.cache.hogwild import HogwildCache
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree_branch import TreeBranchCache
from hf_parallel.generation import (
    CHAIN_OF_DRAFT,
    GenerationStats,
    Hotspot,
    ParallelConfig,
    ParallelIteratorStreamer,
    ParallelOutput,
    ParallelStreamer,
    ReplayPolicy,
    Stepwise,
    build_prompt,
    chain_of_draft_prompt,
    disable,
    enable,
)
from hf_parallel.generation.modes import (
    BlockFormat,
    Branch,
    HogwildConfig,
    HogwildOutput,
    HogwildSession,
    ParallelBlock,
    ParallelBlockLogitsProcessor,
    PDOSConfig,
    PDOSOutput,
    ResampleConfig,
    SelfConsistencyConfig,
    SelfConsistencyOutput,
    SharedPrefixConfig,
    SkeletonOfThoughtConfig,
    SkeletonOfThoughtOutput,
    SkeletonPoint,
    StageStats,
    Step,
    hogwild_prompt,
    pdos_prompt,
)
from hf_parallel.kernels import Backend, backends
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.models.embedded import load_embedded_model
from hf_parallel.pipelines import TASK, ParallelTextGenerationPipeline

__version__ = "0.1.0"

__all__ = [
    "CHAIN_OF_DRAFT",
    "Backend",
    "BlockCache",
    "BlockFormat",
    "Branch",
    "GenerationStats",
    "HogwildCache",
    "HogwildConfig",
    "HogwildOutput",
    "HogwildSession",
    "Hotspot",
    "LogitsCache",
    "PDOSConfig",
    "PDOSOutput",
    "ParallelBlock",
    "ParallelBlockLogitsProcessor",
    "ParallelConfig",
    "ParallelIteratorStreamer",
    "ParallelOutput",
    "ParallelStreamer",
    "ParallelTextGenerationPipeline",
    "ReplayPolicy",
    "ResampleConfig",
    "SelfConsistencyConfig",
    "SelfConsistencyOutput",
    "SharedPrefixCache",
    "SharedPrefixConfig",
    "SkeletonOfThoughtConfig",
    "SkeletonOfThoughtOutput",
    "SkeletonPoint",
    "StageStats",
    "Step",
    "Stepwise",
    "TreeBranchCache",
    "UnsupportedModelError",
    "backends",
    "build_prompt",
    "chain_of_draft_prompt",
    "disable",
    "enable",
    "hogwild_prompt",
    "hub",
    "load_embedded_model",
    "pdos_prompt",
]

PIPELINE_REGISTRY.register_pipeline(TASK, ParallelTextGenerationPipeline, pt_model=AutoModelForCausalLM, type="text")
