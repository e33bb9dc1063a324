"""The generation modes. Each is one module, or one package, with its settings, rows, prompts, output and presets."""

from hf_parallel.generation.modes.hogwild.config import HogwildConfig, HogwildOutput
from hf_parallel.generation.modes.hogwild.prompt import hogwild_prompt
from hf_parallel.generation.modes.hogwild.session import HogwildSession
from hf_parallel.generation.modes.hogwild.worker import Step
from hf_parallel.generation.modes.pdos.blocks import Branch, ParallelBlock, StageStats
from hf_parallel.generation.modes.pdos.config import PDOSConfig, PDOSOutput
from hf_parallel.generation.modes.pdos.format_processor import ParallelBlockLogitsProcessor
from hf_parallel.generation.modes.pdos.parser import BlockFormat
from hf_parallel.generation.modes.pdos.prompt import pdos_prompt
from hf_parallel.generation.modes.resample import ResampleConfig
from hf_parallel.generation.modes.self_consistency import SelfConsistencyConfig, SelfConsistencyOutput
from hf_parallel.generation.modes.shared_prefix import SharedPrefixConfig
from hf_parallel.generation.modes.skeleton_of_thought import (
    SkeletonOfThoughtConfig,
    SkeletonOfThoughtOutput,
    SkeletonPoint,
)

DEFAULT_MODE = HogwildConfig.mode
"""Mode of the command line where none is named."""

__all__ = [
    "DEFAULT_MODE",
    "BlockFormat",
    "Branch",
    "HogwildConfig",
    "HogwildOutput",
    "HogwildSession",
    "PDOSConfig",
    "PDOSOutput",
    "ParallelBlock",
    "ParallelBlockLogitsProcessor",
    "ResampleConfig",
    "SelfConsistencyConfig",
    "SelfConsistencyOutput",
    "SharedPrefixConfig",
    "SkeletonOfThoughtConfig",
    "SkeletonOfThoughtOutput",
    "SkeletonPoint",
    "StageStats",
    "Step",
    "hogwild_prompt",
    "pdos_prompt",
]
