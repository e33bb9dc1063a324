"""Generation of several rows per forward pass: the decode loop, and the mixin that extends `model.generate`."""

from hf_parallel.generation.config import ModePrompt, ModeRows, ModeTraits, ParallelConfig, RowPlace
from hf_parallel.generation.mixin import ParallelGenerationMixin, disable, enable, is_enabled
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.presets import Preset
from hf_parallel.generation.printing import ConsoleStreamer
from hf_parallel.generation.prompts import build_prompt
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.streaming import ParallelIteratorStreamer, ParallelStreamer

__all__ = [
    "MODES",
    "ConsoleStreamer",
    "GenerationStats",
    "ModePrompt",
    "ModeRows",
    "ModeTraits",
    "ParallelConfig",
    "ParallelGenerationMixin",
    "ParallelIteratorStreamer",
    "ParallelOutput",
    "ParallelStreamer",
    "Preset",
    "RowPlace",
    "build_prompt",
    "disable",
    "enable",
    "is_enabled",
]
