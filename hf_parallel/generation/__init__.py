"""The generation floor: who writes the next token where. One decode loop, one file per mode."""

from .config import MODES, ParallelConfig
from .hogwild import HogwildConfig, HogwildOutput
from .mixin import ParallelGenerationMixin, disable, enable
from .outputs import GenerationStats, ParallelOutput
from .prompts import hogwild_prompt
from .shared_prefix import SharedPrefixConfig
from .streaming import ParallelStreamer
from .worker import Step

__all__ = [
    "MODES",
    "GenerationStats",
    "HogwildConfig",
    "HogwildOutput",
    "ParallelConfig",
    "ParallelGenerationMixin",
    "ParallelOutput",
    "ParallelStreamer",
    "SharedPrefixConfig",
    "Step",
    "disable",
    "enable",
    "hogwild_prompt",
]
