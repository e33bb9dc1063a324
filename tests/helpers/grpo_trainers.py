"""Arguments of TRL's GRPO trainers in tests: few steps on a CPU, whose weights and logs can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OF_TRAINER = ("environment_factory", "peft_config", "reward_funcs", "rollout_func", "sampled_log_probs", "tools")
"""Arguments of the trainer itself. Others are those of its config."""
SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "optim": "sgd",  # Adam would turn rounding errors of small gradients into steps
    "learning_rate": 0.01,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "bf16": False,
    "use_cpu": True,
    "seed": 1,
    "disable_tqdm": True,
}


def grpo_arguments(folder: Path, config: type[Any], **given: Any) -> dict[str, Any]:
    """Return arguments of a trainer: `args`, the `config` made of the settings, and its own among those given."""
    of_trainer = {name: given.pop(name) for name in OF_TRAINER if name in given}
    return {"args": config(output_dir=str(folder / "out"), **SETTINGS | given), **of_trainer}


def first_batch(trainer: Any) -> dict[str, Any]:
    """Return the first batch of a trainer's loss."""
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))  # type: ignore[no-any-return]
