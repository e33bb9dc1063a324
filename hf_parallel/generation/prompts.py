"""Prompt helpers: a task through the model's chat template, with what the mode asks of the model."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from jinja2.exceptions import TemplateError

from .arguments import check_tokenizer
from .config import ParallelConfig, check_int, check_template
from .hogwild import HogwildConfig
from .pdos import PDOSConfig

C = TypeVar("C", bound=ParallelConfig)
THINK = "<think>"
"""Opens the reasoning of models that think before they answer."""
CHAIN_OF_DRAFT = (
    "Think in steps, but write down only a draft of each step: at most {max_words} words or one short equation, no "
    "full sentences, nothing twice. In the end give the final answer in full, in the form that is asked for."
)
"""What `chain_of_draft_prompt` tells the model."""


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
    config = _config(HogwildConfig, task, tokenizer, config, settings)
    rules = config.collaboration_prompt.format(names=", ".join(config.names), count=config.num_workers)
    return _encoded(rules, task, tokenizer)


def pdos_prompt(
    task: str, tokenizer: Any, config: PDOSConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task for an answer whose independent parts are written side by side (PDOS, section 3 and appendix A).

    What the format is, with three examples, goes before the task, as `hogwild_prompt` puts its rules. With
    `parallel_hint=False` the task goes alone.

    Parameters
    ----------
    task : str
        What is to be answered.
    tokenizer
        With a chat template; without one the texts are joined by blank lines.
    config : PDOSConfig, optional
        Markers and texts; or give the settings themselves as keyword arguments.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.
    """
    config = _config(PDOSConfig, task, tokenizer, config, settings)
    return _encoded(config.format_prompt.format(**config.markers) if config.parallel_hint else "", task, tokenizer)


def chain_of_draft_prompt(
    task: str, tokenizer: Any, max_words: int = 5, rules: str = CHAIN_OF_DRAFT
) -> dict[str, torch.Tensor]:
    """Wrap a task for an answer with very short reasoning steps (Xu et al., Chain of Draft, 2025).

    For plain `generate` and for any mode. The rules go before the task, as `hogwild_prompt` puts its own. For a mode
    whose helper has rules too, put `rules` and the task together as its task.

    Parameters
    ----------
    task : str
        What is to be solved.
    tokenizer
        With a chat template; without one the texts are joined by blank lines.
    max_words : int
        Words that a step may have.
    rules : str
        What the model is told; `{max_words}` is filled in.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.
    """
    _check(task, tokenizer)
    check_int("max_words", max_words, at_least=1)
    check_template("rules", rules, max_words=max_words)
    return _encoded(rules.format(max_words=max_words), task, tokenizer)


def _check(task: Any, tokenizer: Any) -> None:
    if not isinstance(task, str) or not task.strip():
        raise ValueError(f"task must be a non-empty string, got {task!r}")
    check_tokenizer(tokenizer)


def _config(cls: type[C], task: Any, tokenizer: Any, config: C | None, settings: dict[str, Any]) -> C:
    """Check what a helper was given, and make the config."""
    _check(task, tokenizer)
    if config is not None and (settings or not isinstance(config, cls)):
        raise ValueError(f"give a {cls.__name__} or its settings, got config={config!r} and {sorted(settings)}")
    return cls(**settings) if config is None else config


def _encoded(rules: str, task: str, tokenizer: Any) -> dict[str, torch.Tensor]:
    text = _chat(rules, task, tokenizer)
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not getattr(tokenizer, "chat_template", None))
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def _chat(rules: str, task: str, tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    both = f"{rules}\n\n{task}" if rules else task
    if not template:
        return f"{both}\n\n"
    system = [{"role": "system", "content": rules}] if rules else []
    try:
        text = _render(tokenizer, [*system, {"role": "user", "content": task}])
    except TemplateError:  # the template has no system message
        text = _render(tokenizer, [{"role": "user", "content": both}])
    if THINK in str(template) and not text.rstrip().endswith(THINK):
        text += THINK + "\n"
    return text


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
