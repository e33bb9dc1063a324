"""Settings of `hf-parallel generate`: read from options and checked before a model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable

from transformers import GenerationConfig

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.generation import MODES, ParallelConfig
from hf_parallel.generation.arguments import GENERATION_SETTINGS, check_values
from hf_parallel.generation.config import check_setting_names, make_config
from hf_parallel.generation.presets import SAMPLING_ONLY
from hf_parallel.generation.prompts import check_template_kwargs

SET_OPTIONS = {
    "max_new_tokens": "maximum number of new tokens of each row (256)",
    "num_return_sequences": "answers per prompt (1)",
    "temperature": "sampling temperature",
    "preset": "named defaults of the mode: paper, for the prompts and settings of its paper",
}
"""Settings with an option, short for `--set NAME=VALUE`, and their help."""
_CONSTANTS = {"True": True, "False": False, "None": None}


def add_template_option(add: Callable[..., object]) -> None:
    """Add the option `--chat-template-kwargs`."""
    words = """variables of the chat template, such as '{"enable_thinking": false}'"""
    add("--chat-template-kwargs", type=_template_kwargs, metavar="JSON", help=words)


def _template_kwargs(text: str) -> dict[str, object]:
    try:
        return check_template_kwargs(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (from {text!r})") from error


def describe(mode: str) -> str:
    """Return what a mode does, and the meanings and defaults of its settings."""
    if mode not in MODES:
        return "Plain `generate` of transformers, without a mode. Its settings: " + ", ".join(GENERATION_SETTINGS)
    cls = MODES[mode]
    sections = []
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            sections.append(inspect.cleandoc(base.__doc__ or ""))
    config = cls()
    defaults = [f"{name} = {getattr(config, name)!r}" for name in cls.fields()]
    sections.append("Defaults\n--------\n" + "\n".join(defaults))
    return "\n\n".join(sections)


def read_settings(options: argparse.Namespace) -> tuple[ParallelConfig | None, dict[str, object]]:
    """Return the mode's config (None without a mode) and the arguments of `generate`; check them."""
    cls = MODES.get(options.mode)
    of_generate: dict[str, object] = {}
    of_mode: dict[str, object] = {}
    if cls is not None and options.seed is not None:
        of_mode["seed"] = options.seed
    for text in options.set:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
        if name == "logits_cache":
            raise ValueError(f"--set cannot hold the object {name} (got {text!r}); use --logits-cache FILE")
        check_setting_names(cls, {name: value}, GENERATION_SETTINGS)
        if cls is not None and name in cls.fields():
            of_mode[name] = parse(value, getattr(cls, name, None))
        else:
            of_generate[name] = parse(value, getattr(GenerationConfig(), name, None))
    if any(of_generate.get(name) is not None for name in SAMPLING_ONLY):
        of_generate.setdefault("do_sample", True)
    if of_generate.get("max_length") is None:
        of_generate.setdefault("max_new_tokens", 256)
    check_generation(of_generate)
    if options.logits_cache is not None or (cls is not None and cls.traits.needs_logits_cache):
        if cls is None or "logits_cache" not in cls.fields():
            raise ValueError(f"--logits-cache needs a mode with logits_cache, got --mode {options.mode}")
        path = options.logits_cache
        is_stored = path is not None and path.exists()
        of_mode["logits_cache"] = LogitsCache.load(path) if is_stored else LogitsCache()
    config = None if cls is None else make_config(cls.mode, of_mode)
    return config, of_generate


def check_generation(settings: dict[str, object]) -> None:
    """Raise `ValueError` for values that `generate` rejects for any model, or that greedy decoding ignores."""
    sampling = [name for name in SAMPLING_ONLY if settings.get(name) is not None]
    if sampling and not settings.get("do_sample"):
        raise ValueError(f"do_sample=False disables sampling, so it cannot be combined with {', '.join(sampling)}")
    check_values(settings)
    GenerationConfig(**{"do_sample": True, **settings})  # the model's own config may enable sampling


def parse(text: str, default: object) -> object:
    """Parse the value of a setting: JSON, `True`, `False`, `None` or text; always text if the default is a string."""
    try:
        value = json.loads(text)
    except ValueError:
        value = _CONSTANTS.get(text, text)
    return value if isinstance(value, str) or not isinstance(default, str) else text
