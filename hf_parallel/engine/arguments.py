"""Arguments of `Engine.submit`: the config of a request, and the arguments of `generate` that prepare it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.cache.placement import execution_device
from hf_parallel.generation.arguments import check_generation_config, check_no_logits_cache
from hf_parallel.generation.config import ParallelConfig, make_config
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes import PLAIN_MODE
from hf_parallel.generation.prompts import NOT_RENDERED, check_task, check_unused_template_kwargs, encode_task
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.validation import check_int, check_text, is_int
from hf_parallel.models.images import image_inputs
from hf_parallel.models.probing.signature import CACHE
from hf_parallel.models.ranks import num_ranks


def check_limits(required: Mapping[str, object], **optional: object) -> None:
    """Raise `ValueError` for a limit of an engine that is not a positive int, or None if it is optional."""
    for name, limit in required.items():
        check_int(name, limit, at_least=1)
    for name, limit in optional.items():
        if limit is not None:
            check_int(name, limit, at_least=1)


def check_request(priority: object, cache_salt: object) -> None:
    """Raise `ValueError` for a priority that is not an int, or a salt that is not a string or None."""
    if not is_int(priority):
        raise ValueError(f"priority must be an int, got {priority!r}")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt must be a string or None, got {cache_salt!r}")


def submitter_key(submitter: object) -> tuple[type, int]:
    """Return what is equal for equal submitters, computed once: an object of the caller may change or raise later.

    Raises `ValueError` if the submitter has no hash.
    """
    try:
        return type(submitter), hash(submitter)
    except TypeError as error:
        raise ValueError(f"submitter must be hashable, such as a string, got {submitter!r}") from error


def split_arguments(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Any,
    mode: str | None,
    settings: Mapping[str, Any],
) -> tuple[ParallelConfig, dict[str, Any]]:
    """Return the config of a request, and the other arguments of `generate`. `tokenizer` is the engine's."""
    check_no_logits_cache(settings)
    if {"past_key_values", CACHE} & settings.keys():
        raise ValueError("an engine has a cache of its own: past_key_values cannot be given")
    arguments = dict(settings)
    generation_config = arguments.get("generation_config")
    check_generation_config(generation_config)
    if generation_config is None:
        arguments["return_dict_in_generate"] = True
    else:  # transformers deprecates settings beside a config
        arguments.pop("return_dict_in_generate", None)
        arguments["generation_config"] = copy.copy(generation_config)
        arguments["generation_config"].return_dict_in_generate = True
    parallel_config = arguments.get("parallel_config")
    config: ParallelConfig | None
    if mode is None and not isinstance(parallel_config, ParallelConfig):
        if parallel_config is not None:
            raise ValueError("parallel_config was given without a generation_mode")
        plain_settings = {name: arguments.pop(name) for name in MODES[PLAIN_MODE].fields() if name in arguments}
        config = make_config(PLAIN_MODE, plain_settings)
        config.is_implicit = True
    else:
        if mode is not None:
            arguments["generation_mode"] = mode
        config = take_parallel_config(model.generation_config, arguments)
    assert config is not None, "a mode is named"
    images = image_inputs(model) & arguments.keys()
    if images and num_ranks(model) > 1:
        raise ValueError(f"an engine over a model that several processes compute reads no images, got {sorted(images)}")
    if arguments.get("tokenizer") is None and tokenizer is not None:
        arguments["tokenizer"] = tokenizer
    template = arguments.pop("chat_template_kwargs", None)
    mask = arguments.pop("attention_mask", None)
    tokenizer = arguments.get("tokenizer")
    device = execution_device(model)
    encoded = encode_prompt(prompt, config, tokenizer, device, template, mask)
    given_twice = arguments.keys() & {*encoded, "inputs", "input_ids"}
    if given_twice:
        raise ValueError(f"the prompt is the first argument of submit, got {sorted(given_twice)} as well")
    return config, arguments | encoded


def encode_prompt(
    prompt: Any,
    config: ParallelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    template: Mapping[str, object] | None = None,
    mask: Any = None,
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, int64 `[rows, length]`, of a prompt as `Engine.submit` takes it.

    `template` are the `chat_template_kwargs` of `submit`, `mask` is its `attention_mask`.
    """
    is_chat = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
    if mask is not None and (is_chat or isinstance(prompt, str | Mapping)):
        raise ValueError("attention_mask can only be given with token ids: text and mappings have their own")
    if isinstance(prompt, Mapping):
        check_unused_template_kwargs(template, NOT_RENDERED)
        types = {name: type(value).__name__ for name, value in prompt.items()}
        if not prompt or not all(isinstance(value, torch.Tensor) for value in prompt.values()):
            raise ValueError(f"prompt must have input_ids, and only tensors (return_tensors='pt'), got {types}")
        return {name: value.to(device) for name, value in prompt.items()}
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(item, str) for item in prompt):
        raise ValueError(f"prompt is a list of {len(prompt)} texts: submit each by itself")
    if is_chat or isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt is text: give the Engine a tokenizer, or pass token ids")
        if is_chat or config.prompt.rules() is not None:
            check_task(prompt, tokenizer)
            encoded = encode_task(config, prompt, tokenizer, template)
            return {name: value.to(device) for name, value in encoded.items()}
        check_text("prompt", prompt)
        prompt = tokenizer(prompt)["input_ids"]
    check_unused_template_kwargs(template, NOT_RENDERED)
    try:
        ids = torch.as_tensor(prompt, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"prompt must be text, a chat or token ids, got {type(prompt).__name__}") from error
    if not ids.numel():
        raise ValueError("prompt must have at least one message or token id")
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or ids.dtype.is_floating_point:
        got = f"{list(ids.shape)} {ids.dtype}"
        raise ValueError(f"prompt must be text, a chat, or token ids [length] or [rows, length], got {got}")
    if mask is None:
        mask = torch.ones_like(ids)
    if isinstance(mask, torch.Tensor):
        mask = mask.to(device)
    return {"input_ids": ids, "attention_mask": mask}
