"""Prompt builder of the hogwild mode."""

from __future__ import annotations

from typing import Any

import torch

from hf_parallel.generation.modes.hogwild.config import HogwildConfig
from hf_parallel.generation.prompts import Chat, build_prompt


def hogwild_prompt(
    task: str | Chat, tokenizer: Any, config: HogwildConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Build the prompt of a task for several workers (Hogwild! Inference, section 3.3 and appendix C).

    The collaboration prompt precedes the task: as system message or, if the chat template has none, in the user
    message. If the template contains `<think>`, the answer starts inside it.

    Parameters
    ----------
    task : str or list of dict
        The task, or a chat that ends with it.
    tokenizer
        With a chat template; without one the texts are joined by blank lines.
    config : HogwildConfig, optional
        Worker names and texts. Alternatively pass settings as keyword arguments.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.
    """
    return build_prompt(HogwildConfig, task, tokenizer, config, **settings)
