"""The generation floor: who writes the next token where. One decode loop, one file per mode."""

from .blocks import Branch, ParallelBlock, StageStats
from .config import MODES, ParallelConfig
from .hogwild import HogwildConfig, HogwildOutput
from .logits_process import ParallelBlockLogitsProcessor
from .mixin import ParallelGenerationMixin, disable, enable
from .outputs import GenerationStats, ParallelOutput
from .pdos import PDOSConfig, PDOSOutput
from .prompts import CHAIN_OF_DRAFT, chain_of_draft_prompt, hogwild_prompt, pdos_prompt
from .replay import Hotspot, ReplayPolicy, Stepwise
from .resample import ResampleConfig
from .self_consistency import SelfConsistencyConfig, SelfConsistencyOutput
from .shared_prefix import SharedPrefixConfig
from .skeleton import BlockFormat
from .skeleton_of_thought import SkeletonOfThoughtConfig, SkeletonOfThoughtOutput, SkeletonPoint
from .streaming import ParallelIteratorStreamer, ParallelStreamer
from .worker import Step

__all__ = [
    "CHAIN_OF_DRAFT",
    "MODES",
    "BlockFormat",
    "Branch",
    "GenerationStats",
    "HogwildConfig",
    "HogwildOutput",
    "Hotspot",
    "PDOSConfig",
    "PDOSOutput",
    "ParallelBlock",
    "ParallelBlockLogitsProcessor",
    "ParallelConfig",
    "ParallelGenerationMixin",
    "ParallelOutput",
    "ParallelIteratorStreamer",
    "ParallelStreamer",
    "ReplayPolicy",
    "ResampleConfig",
    "SelfConsistencyConfig",
    "SelfConsistencyOutput",
    "SharedPrefixConfig",
    "SkeletonOfThoughtConfig",
    "SkeletonOfThoughtOutput",
    "SkeletonPoint",
    "StageStats",
    "Step",
    "Stepwise",
    "chain_of_draft_prompt",
    "disable",
    "enable",
    "hogwild_prompt",
    "pdos_prompt",
]
