"""Prompt builder of the hogwild mode."""

from __future__ import annotations

from typing import Any

import torch

from hf_parallel.generation.modes.hogwild.config import HogwildConfig
from hf_parallel.generation.prompts import Chat, build_prompt


def hogwild_prompt(
    task: str | Chat, tokenizer: Any, config: HogwildConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task for workers that think together (Hogwild! Inference, section 3.3 and appendix C).

    The collaboration prompt goes before the task, as system message or, where the template has none, in the user's.
    If the template knows `<think>`, the answer begins inside it.

    Parameters
    ----------
    task : str or list of dict
        What is to be solved, or a chat that ends with it.
    tokenizer
        With a chat template; without one the texts are joined by blank lines.
    config : HogwildConfig, optional
        Names and texts; or give the settings themselves as keyword arguments.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.
    """
    return build_prompt(HogwildConfig, task, tokenizer, config, **settings)
