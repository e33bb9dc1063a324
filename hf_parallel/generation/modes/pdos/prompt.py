"""Prompt builder of the pdos mode."""

from __future__ import annotations

from typing import Any

import torch

from hf_parallel.generation.modes.pdos.config import PDOSConfig
from hf_parallel.generation.prompts import Chat, build_prompt


def pdos_prompt(
    task: str | Chat, tokenizer: Any, config: PDOSConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task for an answer whose independent parts are written side by side (PDOS, section 3 and appendix A).

    What the format is, with three examples, goes before the task, as `hogwild_prompt` puts its rules. With
    `parallel_hint=False` the task goes alone.

    Parameters
    ----------
    task : str or list of dict
        What is to be answered, or a chat that ends with it.
    tokenizer
        With a chat template; without one the texts are joined by blank lines.
    config : PDOSConfig, optional
        Markers and texts; or give the settings themselves as keyword arguments.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.
    """
    return build_prompt(PDOSConfig, task, tokenizer, config, **settings)
