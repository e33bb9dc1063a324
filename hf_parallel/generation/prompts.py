"""Prompt helpers: a task through the model's chat template, with what the mode asks of the model."""

from __future__ import annotations

from typing import Any

import torch
from jinja2.exceptions import TemplateError

from .arguments import check_tokenizer
from .hogwild import HogwildConfig

THINK = "<think>"
"""Opens the reasoning of models that think before they answer."""


def hogwild_prompt(
    task: str, tokenizer: Any, config: HogwildConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task for workers that think together (Hogwild! Inference, section 3.3 and appendix C).

    The collaboration prompt goes before the task, as system message or, where the template has none, in the user's.
    If the template knows `<think>`, the answer begins inside it.

    Parameters
    ----------
    task : str
        What is to be solved.
    tokenizer
        With a chat template; without one the texts are joined by blank lines.
    config : HogwildConfig, optional
        Names and texts; or give the settings themselves as keyword arguments.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.
    """
    if not isinstance(task, str) or not task.strip():
        raise ValueError(f"task must be a non-empty string, got {task!r}")
    if config is not None and (settings or not isinstance(config, HogwildConfig)):
        raise ValueError(f"give a HogwildConfig or its settings, got config={config!r} and {sorted(settings)}")
    check_tokenizer(tokenizer)
    config = HogwildConfig(**settings) if config is None else config
    rules = config.collaboration_prompt.format(names=", ".join(config.names), count=config.num_workers)
    text = _chat(rules, task, tokenizer)
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not getattr(tokenizer, "chat_template", None))
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def _chat(rules: str, task: str, tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return f"{rules}\n\n{task}\n\n"
    try:
        text = _render(tokenizer, [{"role": "system", "content": rules}, {"role": "user", "content": task}])
    except TemplateError:  # the template has no system message
        text = _render(tokenizer, [{"role": "user", "content": f"{rules}\n\n{task}"}])
    if THINK in str(template) and not text.rstrip().endswith(THINK):
        text += THINK + "\n"
    return text


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
