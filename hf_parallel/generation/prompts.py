"""Prompt helpers: a task through the model's chat template, with what the mode asks of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import is_valid_message

from hf_parallel.generation.arguments import check_tokenizer
from hf_parallel.generation.config import ParallelConfig, check_int, check_template, unknown_setting
from hf_parallel.generation.registry import MODES

C = TypeVar("C", bound=ParallelConfig)
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages as chat templates take them."""
THINK = "<think>"
"""Opens the reasoning of models that think before they answer."""
CHAIN_OF_DRAFT = (
    "Think in steps, but write down only a draft of each step: at most {max_words} words or one short equation, no "
    "full sentences, nothing twice. In the end give the final answer in full, in the form that is asked for."
)
"""What `chain_of_draft_prompt` tells the model."""


def build_prompt(
    mode: str | type[ParallelConfig],
    task: str | Chat,
    tokenizer: Any,
    config: ParallelConfig | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Wrap a task with the instructions of a mode.

    The instructions go into the system message or, where the template has none, before the first message of the user.
    If the template contains `<think>`, the prompt ends with it.

    Parameters
    ----------
    mode : str or subclass of ParallelConfig
    task : str or list of dict
        The task, or a chat that ends with it.
    tokenizer
        Without a chat template the texts are joined by blank lines.
    config : ParallelConfig, optional
        Settings of the mode; or pass the settings themselves as keyword arguments.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.

    Raises
    ------
    ValueError
        For an empty task, an unknown mode or unknown settings.
    """
    cls = MODES[mode] if isinstance(mode, str) else mode
    config = _config(cls, task, tokenizer, config, settings)
    return encode_task(config.system_prompt(), task, tokenizer)


def chain_of_draft_prompt(
    task: str | Chat, tokenizer: Any, max_words: int = 5, rules: str = CHAIN_OF_DRAFT
) -> dict[str, torch.Tensor]:
    """Wrap a task for an answer with very short reasoning steps (Xu et al., Chain of Draft, 2025).

    For plain `generate` and for any mode. The rules go before the task, as `hogwild_prompt` puts its own. For a mode
    whose helper has rules too, put `rules` and the task together as its task.

    Parameters
    ----------
    task : str or list of dict
        What is to be solved, or a chat that ends with it.
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
    return encode_task(rules.format(max_words=max_words), task, tokenizer)


def render(rules: str, task: str | Chat, tokenizer: Any, **template: Any) -> str:
    """A task or a chat as the text that the model reads, with rules before it.

    Rules go into the system message or, where the template has none, before the first message of the user.

    Parameters
    ----------
    rules : str
        Empty: none.
    task : str or list of dict
    tokenizer
        A chat needs its chat template; a task without one is joined to the rules by a blank line.
    **template
        Arguments of `apply_chat_template`. The answer goes on with the last message of a chat if that is the
        assistant's, unless `continue_final_message` says otherwise.
    """
    if isinstance(task, str):
        if not getattr(tokenizer, "chat_template", None):
            return f"{rules}\n\n{task}\n\n" if rules else f"{task}\n\n"
        task = [{"role": "user", "content": task}]
    continued = template.pop("continue_final_message", None)
    if continued is None:
        continued = task[-1]["role"] == "assistant"
    template |= {"continue_final_message": True} if continued else {"add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(_with_rules(rules, task, "system"), tokenize=False, **template)
    except TemplateError:  # the template has no system message
        text = tokenizer.apply_chat_template(_with_rules(rules, task, "user"), tokenize=False, **template)
    thinks = THINK in str(tokenizer.chat_template) and not continued
    return text + THINK + "\n" if thinks and not text.rstrip().endswith(THINK) else text


def _check(task: Any, tokenizer: Any) -> None:
    is_chat = isinstance(task, list | tuple) and bool(task) and all(map(is_valid_message, task))
    if not is_chat and (not isinstance(task, str) or not task.strip()):
        raise ValueError(f"task must be a non-empty string or a chat of messages with role and content, got {task!r}")
    check_tokenizer(tokenizer)


def _config(cls: type[C], task: Any, tokenizer: Any, config: C | None, settings: dict[str, Any]) -> C:
    """Check what a helper was given, and make the config."""
    _check(task, tokenizer)
    if config is not None and (settings or not isinstance(config, cls)):
        raise ValueError(f"give a {cls.__name__} or its settings, got config={config!r} and {sorted(settings)}")
    for name, value in settings.items():
        if name not in cls.fields():
            raise unknown_setting(cls, name, value)
    return cls(**settings) if config is None else config


def encode_task(rules: str | None, task: str | Chat, tokenizer: Any) -> dict[str, torch.Tensor]:
    """What `render` gives as `input_ids` and `attention_mask`, `int64 [1, length]`; no rules: the task alone."""
    text = render(rules or "", task, tokenizer)
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not getattr(tokenizer, "chat_template", None))
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def _with_rules(rules: str, chat: Chat, role: str) -> Chat:
    """A chat whose first message of a role begins with the rules; a system message is added where there is none."""
    if not rules:
        return chat
    place = next((i for i, message in enumerate(chat) if message["role"] == role), None)
    if place is None:
        return [{"role": role, "content": rules}, *chat]
    content = chat[place]["content"]
    if not isinstance(content, str):
        raise ValueError(f"the content of the {role} message must be a string to put the rules before, got {content!r}")
    return [*chat[:place], {**chat[place], "content": f"{rules}\n\n{content}"}, *chat[place + 1 :]]
