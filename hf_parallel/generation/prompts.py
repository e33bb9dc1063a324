"""Prompt builders: apply the chat template to a task and the instructions of a mode."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import is_valid_message

from hf_parallel.detokenizer import check_tokenizer
from hf_parallel.generation.config import ModePrompt, ParallelConfig, check_setting_names
from hf_parallel.generation.presets import marked_preset
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import check_text

Message: TypeAlias = Mapping[str, Any]
"""Message of a chat template: its role, its content, and what else the template reads."""
Chat: TypeAlias = Sequence[Message]
# Tags around the reasoning of a reasoning model.
THINK = "<think>"
END_THINK = "</think>"
ENABLE_THINKING = "enable_thinking"  # variable of many templates; False: the answer has no reasoning
NOT_RENDERED = "only chats, and texts in a mode with a prompt builder, are rendered by the chat template"
_RESERVED = {"messages", "conversations", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
_RESERVED -= {"tools", "documents"}


def build_prompt(
    mode: str | type[ParallelConfig],
    task: str | Chat,
    tokenizer: PreTrainedTokenizerBase,
    config: ParallelConfig | None = None,
    *,
    chat_template_kwargs: Mapping[str, object] | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Build the prompt of a task for a mode.

    The mode's instructions go into the system message or, if the chat template has none, before the first user message.
    `ModePrompt.thinking` says whether the mode opens or disables the reasoning of a reasoning model.

    Parameters
    ----------
    mode : str or subclass of ParallelConfig
    task : str or list of dict
        The task, or a chat that ends with it.
    tokenizer
        If it has no chat template, a blank line separates instructions and task.
    config : ParallelConfig, optional
        Settings of the mode. Alternatively pass them as keyword arguments. The tokenizer of a model with presets (see
        `load_embedded_model`) adds the preset of the mode; settings given here override it.
    chat_template_kwargs : mapping, optional
        Variables of the chat template, such as `{"enable_thinking": False}`, for `apply_chat_template`.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, `int64 [1, length]`, for `model.generate(**prompt, ...)`.

    Raises
    ------
    ValueError
        For an empty task, an unknown mode or unknown settings, and if the chat template raises an error.
    """
    if isinstance(mode, str) and mode not in MODES:
        raise ValueError(f"mode must be one of {sorted(MODES)}, got {mode!r}")
    cls = MODES[mode] if isinstance(mode, str) else mode
    check_task(task, tokenizer)
    if config is not None and (settings or not isinstance(config, cls)):
        raise ValueError(f"pass a {cls.__name__} or its settings, got config={config!r} and {sorted(settings)}")
    check_setting_names(cls, settings)
    config = cls(**settings) if config is None else config
    config = type(config)(**{**marked_preset(config.mode, tokenizer), **config.given()})
    return encode_task(config, task, tokenizer, chat_template_kwargs)


def encode_task(
    config: ParallelConfig | None,
    task: str | Chat,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """Encode a task with the instructions of a mode (None: without any); returns what `build_prompt` returns."""
    prompt = None if config is None else config.prompt
    return _encode(render_prompt(prompt, task, tokenizer, chat_template_kwargs), tokenizer)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    check_text("task", text)
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not getattr(tokenizer, "chat_template", None))
    ids = None
    mask = None
    if isinstance(encoded, Mapping):
        ids = encoded.get("input_ids")
        mask = encoded.get("attention_mask")
    if not (isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and ids.numel()):
        raise ValueError(
            "tokenizer must return input_ids and attention_mask, tensors [1, length] with at least one token, for "
            f"return_tensors='pt'; got {encoded!r} for {text!r}"
        )
    return {"input_ids": ids, "attention_mask": mask}


def render_prompt(
    prompt: ModePrompt | None,
    task: str | Chat,
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, object] | None = None,
    **template: Any,
) -> str:
    """Return the text of a prompt, see `build_prompt`. `template` are arguments of `apply_chat_template`.

    `prompt` is the mode's (None: without a mode). `continue_final_message` defaults to whether the last message is the
    assistant's.
    """
    rules = None
    thinking = None
    is_last = False  # whether the rules follow the task
    if prompt is not None:
        rules = prompt.rules()
        thinking = prompt.thinking
        is_last = prompt.rules_last
        if isinstance(task, str):
            task = prompt.task_text(task)
    template_kwargs = check_template_kwargs(chat_template_kwargs)
    if isinstance(task, str):
        if not getattr(tokenizer, "chat_template", None):
            check_unused_template_kwargs(template_kwargs, "the tokenizer has no chat template")
            parts = (task, rules) if is_last else (rules, task)
            return "".join(f"{part}\n\n" for part in parts if part)
        task = [{"role": "user", "content": task}]
    source = str(getattr(tokenizer, "chat_template", None))
    continued = template.pop("continue_final_message", None)
    if continued is None:
        continued = task[-1]["role"] == "assistant"
    if thinking is False and ENABLE_THINKING in source:
        template.setdefault(ENABLE_THINKING, False)
    template |= template_kwargs
    template["continue_final_message" if continued else "add_generation_prompt"] = True
    chat = with_rules(rules, task, "user" if is_last else "system", is_last)
    try:
        text = apply_template(chat, tokenizer, **template)
    except ValueError:
        if not rules or is_last:
            raise
        text = apply_template(with_rules(rules, task, "user"), tokenizer, **template)  # it has no system message
    can_think = thinking and THINK in source and not continued
    if can_think and not text.rstrip().endswith((THINK, END_THINK)):
        text = f"{text}{THINK}\n"
    return text


def apply_template(chat: Chat, tokenizer: PreTrainedTokenizerBase, **template: Any) -> str:
    """Return the text of a chat. Raises `ValueError` for any error of the chat template, which is a program."""
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, **template)  # type: ignore[assignment, arg-type]
    except Exception as error:
        raise ValueError(f"the chat template cannot render these messages: {type(error).__name__}: {error}") from error
    return text


def check_template_kwargs(given: object) -> Arguments:
    """Return `chat_template_kwargs`; raise `ValueError` unless it maps names of variables of a template to values."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"chat_template_kwargs must map variables of the chat template to values, such as "
            f"{{'{ENABLE_THINKING}': False}}, got {given!r}"
        )
    taken = sorted(given.keys() & _RESERVED)
    if taken:
        raise ValueError(f"chat_template_kwargs must hold variables of the chat template only, got {', '.join(taken)}")
    return dict(given)


def check_unused_template_kwargs(given: object, reason: str) -> None:
    """Raise `ValueError` if `chat_template_kwargs` is given for a prompt that no template renders."""
    if check_template_kwargs(given):
        raise ValueError(f"chat_template_kwargs={given!r} has no effect: {reason}")


def check_task(task: object, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` unless `task` is a text or a chat, and `tokenizer` a tokenizer."""
    is_chat = isinstance(task, list | tuple) and bool(task) and all(map(is_valid_message, task))
    if not is_chat and (not isinstance(task, str) or not task.strip()):
        raise ValueError(f"task must be a non-empty string or a chat of messages with role and content, got {task!r}")
    check_tokenizer(tokenizer)


def with_rules(rules: str | None, chat: Chat, role: str, is_last: bool = False) -> Chat:
    """Prepend rules to the first message of a role, or insert one; `is_last`: append them to the last one."""
    if not rules:
        return chat
    of_role = [index for index, message in enumerate(chat) if message["role"] == role]
    part = {"type": "text", "text": rules}
    if not of_role:
        is_text = isinstance(chat[0]["content"], str)
        return [{"role": role, "content": rules if is_text else [part]}, *chat]
    index = of_role[-1] if is_last else of_role[0]
    content = chat[index]["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{rules}" if is_last else f"{rules}\n\n{content}"
    elif isinstance(content, list):
        rule = {**part, "text": f"\n\n{rules}" if is_last else f"{rules}\n\n"}
        content = [*content, rule] if is_last else [rule, *content]
    else:
        raise ValueError(f"the {role} message must hold a string or a list of parts for the rules, got {content!r}")
    message = {**chat[index], "content": content}
    return [*chat[:index], message, *chat[index + 1 :]]
