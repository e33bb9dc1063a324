"""The generation floor: who writes the next token where. One decode loop, one file per mode."""

from .config import MODES, ParallelConfig
from .mixin import ParallelGenerationMixin, disable, enable
from .outputs import GenerationStats, ParallelOutput
from .shared_prefix import SharedPrefixConfig

__all__ = [
    "MODES",
    "GenerationStats",
    "ParallelConfig",
    "ParallelGenerationMixin",
    "ParallelOutput",
    "SharedPrefixConfig",
    "disable",
    "enable",
]
