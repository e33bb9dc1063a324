"""Training on data that is laid out as inference lays it out (docs/training.md)."""

from __future__ import annotations

from typing import Any

from hf_parallel.training.attention import prepare_model, teacher_forced_logits
from hf_parallel.training.collator import DataCollatorForParallel
from hf_parallel.training.example import ParallelExample
from hf_parallel.training.masks import stock_mask
from hf_parallel.training.tree import tree_logprobs

__all__ = [
    "DataCollatorForParallel",
    "ParallelExample",
    "SharedPrefixGRPOTrainer",
    "prepare_model",
    "stock_mask",
    "teacher_forced_logits",
    "tree_logprobs",
]


def __getattr__(name: str) -> Any:
    """Import what needs TRL when it is used."""
    if name != "SharedPrefixGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_parallel.training.grpo import SharedPrefixGRPOTrainer

    return SharedPrefixGRPOTrainer
