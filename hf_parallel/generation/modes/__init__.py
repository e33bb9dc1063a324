"""The generation modes. Each is one module or package with its settings, rows, prompts, output and presets.

Importing this package imports all modules in its folder, which registers their modes. The names in `__all__` are
public in `hf_parallel`, whose `__init__.pyi` lists them.
"""

from importlib import import_module
from pkgutil import iter_modules

from hf_parallel.generation.call_dialects import CallDialect
from hf_parallel.generation.modes.beam_search import BeamSearchOutput
from hf_parallel.generation.modes.best_of import BestOfConfig, BestOfOutput
from hf_parallel.generation.modes.branches.output import StageStats
from hf_parallel.generation.modes.candidates.candidate import Candidate
from hf_parallel.generation.modes.candidates.reward_model import RewardModel
from hf_parallel.generation.modes.final_answers import BOXED, find_answer, normal_form
from hf_parallel.generation.modes.final_answers import find_matches as find_matches
from hf_parallel.generation.modes.final_answers import majority as majority
from hf_parallel.generation.modes.fork_join import Fork, ForkJoinConfig, ForkJoinOutput, Path
from hf_parallel.generation.modes.hogwild.async_reasoning import AsyncReasoningConfig
from hf_parallel.generation.modes.hogwild.config import HogwildConfig, hogwild_prompt
from hf_parallel.generation.modes.hogwild.output import HogwildOutput, Step
from hf_parallel.generation.modes.hogwild.session import HogwildSession
from hf_parallel.generation.modes.pdos.config import PDOSConfig, pdos_prompt
from hf_parallel.generation.modes.pdos.format_processor import ParallelBlockLogitsProcessor
from hf_parallel.generation.modes.pdos.output import Branch, ParallelBlock, PDOSOutput
from hf_parallel.generation.modes.pdos.parser import BlockFormat
from hf_parallel.generation.modes.resample import ResampleConfig
from hf_parallel.generation.modes.search.config import SearchConfig
from hf_parallel.generation.modes.search.output import SearchBranch, SearchOutput
from hf_parallel.generation.modes.self_consistency import SelfConsistencyConfig, SelfConsistencyOutput
from hf_parallel.generation.modes.shared_prefix import SharedPrefixConfig
from hf_parallel.generation.modes.skeleton_of_thought import (
    SkeletonOfThoughtConfig,
    SkeletonOfThoughtOutput,
    SkeletonPoint,
)

PLAIN_MODE = SharedPrefixConfig.mode
"""Mode with the tokens of plain `generate`, and default of the command line."""
NO_MODE = "none"
"""Name of plain `generate`, without a mode, on the command line and in sweeps."""

__all__ = [
    "AsyncReasoningConfig",
    "BOXED",
    "BeamSearchOutput",
    "BestOfConfig",
    "BestOfOutput",
    "BlockFormat",
    "Branch",
    "CallDialect",
    "Candidate",
    "Fork",
    "ForkJoinConfig",
    "ForkJoinOutput",
    "HogwildConfig",
    "HogwildOutput",
    "HogwildSession",
    "PDOSConfig",
    "PDOSOutput",
    "ParallelBlock",
    "Path",
    "ParallelBlockLogitsProcessor",
    "ResampleConfig",
    "RewardModel",
    "SearchBranch",
    "SearchConfig",
    "SearchOutput",
    "SelfConsistencyConfig",
    "SelfConsistencyOutput",
    "SharedPrefixConfig",
    "SkeletonOfThoughtConfig",
    "SkeletonOfThoughtOutput",
    "SkeletonPoint",
    "StageStats",
    "Step",
    "find_answer",
    "hogwild_prompt",
    "normal_form",
    "pdos_prompt",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
