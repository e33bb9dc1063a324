"""Training on data that is laid out as inference lays it out (docs/training.md)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hf_parallel.training.attention import prepare_model, teacher_forced_logits
from hf_parallel.training.collator import DataCollatorForParallel
from hf_parallel.training.dialects import Dialect, SkeletonDialect
from hf_parallel.training.example import ParallelExample
from hf_parallel.training.masks import stock_mask
from hf_parallel.training.tree import tree_logprobs

__all__ = [
    "DataCollatorForParallel",
    "Dialect",
    "ParallelExample",
    "SharedPrefixGRPOTrainer",
    "SharedPrefixLossMixin",
    "SkeletonDialect",
    "make_rollout_func",
    "prepare_model",
    "stock_mask",
    "teacher_forced_logits",
    "tree_logprobs",
]


_OF_TRL = {"SharedPrefixGRPOTrainer": "grpo", "SharedPrefixLossMixin": "grpo", "make_rollout_func": "rollouts"}


def __getattr__(name: str) -> Any:
    """Import what needs TRL when it is used."""
    if name not in _OF_TRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OF_TRL[name]}"), name)
