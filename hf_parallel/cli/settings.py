"""Settings of `hf-parallel generate`: read from options and checked before a model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers import GenerationConfig

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.generation import MODES, ParallelConfig
from hf_parallel.generation.arguments import GENERATION_SETTINGS, check_values
from hf_parallel.generation.config import check_setting_names, make_config
from hf_parallel.generation.presets import SAMPLING_ONLY
from hf_parallel.generation.prompts import check_template_kwargs

PLAIN = "generate"  # value of `--mode` for `generate` without a mode
GENERATION_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_new_tokens", int, "maximum number of new tokens of each row (256)"),
    ("num_return_sequences", int, "answers per prompt (1)"),
    ("temperature", float, "sampling temperature"),
    ("top_p", float, "sample from the most probable tokens whose probabilities sum to this"),
    ("top_k", int, "sample from this many of the most probable tokens"),
    ("repetition_penalty", float, "above 1: repeat less"),
)
"""Settings of `generate` that have an option: name, type, help."""
_CONSTANTS = {"True": True, "False": False, "None": None}
_PROCESSORS: dict[str, tuple[Callable[[Any], object], object]] = {
    "temperature": (transformers.TemperatureLogitsWarper, 1),
    "top_k": (transformers.TopKLogitsWarper, 0),
    "top_p": (transformers.TopPLogitsWarper, 1),
    "min_p": (transformers.MinPLogitsWarper, None),
    "typical_p": (transformers.TypicalLogitsWarper, 1),
    "epsilon_cutoff": (transformers.EpsilonLogitsWarper, 0),
    "eta_cutoff": (transformers.EtaLogitsWarper, 0),
    "repetition_penalty": (transformers.RepetitionPenaltyLogitsProcessor, 1),
}
"""By setting: its logits processor, which raises for a value out of range, and the value that disables it."""


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
        return "No mode: plain `generate` of transformers. Its settings: " + ", ".join(GENERATION_SETTINGS)
    cls = MODES[mode]
    classes = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    texts = [inspect.cleandoc(base.__doc__ or "") for base in classes]
    defaults = [f"{field.name} = {_default(field)}" for field in dataclasses.fields(cls) if field.init]
    return "\n\n".join([*texts, "Defaults\n--------\n" + "\n".join(defaults)])


def _default(field: dataclasses.Field[object]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return repr(value)


def read_settings(options: argparse.Namespace) -> tuple[ParallelConfig | None, dict[str, object]]:
    """Return the mode's config (None without a mode) and the arguments of `generate`; check them."""
    cls = MODES.get(options.mode)
    given, flags = _given_options(options)
    of_mode: dict[str, object] = {"seed": given.pop("seed")} if "seed" in given else {}
    for text in options.set:
        name, value = _parse_set(text, cls, flags)
        (of_mode if cls is not None and name in cls.fields() else given)[name] = value
        flags[name] = f"--set {name}={value}" if name == "do_sample" else f"--set {name}"
    sampling = [flags[name] for name in SAMPLING_ONLY if given.get(name) is not None] + ["--sample"] * bool(
        options.sample
    )
    if sampling and not given.setdefault("do_sample", True):
        raise ValueError(f"{flags['do_sample']} disables sampling, so it cannot be combined with {', '.join(sampling)}")
    if given.get("max_length") is None:
        given.setdefault("max_new_tokens", 256)
    check_generation(given)
    if options.logits_cache is not None or (cls is not None and cls.traits.needs_logits_cache):
        if cls is None or "logits_cache" not in cls.fields():
            raise ValueError(f"--logits-cache needs a mode with logits_cache, got --mode {options.mode}")
        path = options.logits_cache
        of_mode["logits_cache"] = LogitsCache.load(path) if path is not None and path.exists() else LogitsCache()
    return None if cls is None else make_config(cls.mode, of_mode), given


def _given_options(options: argparse.Namespace) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings that were given as options, and those options by setting."""
    names = [*(name for name, _, _ in GENERATION_OPTIONS), "seed"]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    flags = {name: f"--{name.replace('_', '-')}" for name in given}
    if options.greedy or options.sample:
        given["do_sample"] = not options.greedy
        flags["do_sample"] = "--greedy" if options.greedy else "--sample"
    return given, flags


def _parse_set(text: str, cls: type[ParallelConfig] | None, flags: Mapping[str, str]) -> tuple[str, object]:
    """Return the name and value of a `--set` option; `flags` maps settings to the options that gave them."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
    if not flags.get(name, "--set").startswith("--set"):  # a later --set replaces an earlier one
        raise ValueError(f"--set {name} and {flags[name]} are the same setting, give one of them")
    if name == "logits_cache":
        raise ValueError(f"--set cannot hold the object {name} (got {text!r}); use --logits-cache FILE")
    check_setting_names(cls, {name: value}, GENERATION_SETTINGS)
    is_of_mode = cls is not None and name in cls.fields()
    return name, parse(value, getattr(cls if is_of_mode else GenerationConfig(), name, None))


def check_generation(settings: dict[str, object]) -> None:
    """Raise `ValueError` for values that `generate` rejects for any model."""
    check_values(settings)
    GenerationConfig(**{"do_sample": True, **settings})  # the model's own config may enable sampling
    for name, (processor, disabled) in _PROCESSORS.items():
        value = settings.get(name)
        try:
            if value is not None and value != disabled:
                processor(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is invalid: {error}") from error


def parse(text: str, default: object) -> object:
    """Parse the value of a setting: JSON, `True`, `False`, `None` or text; always text if the default is a string."""
    try:
        value = json.loads(text)
    except ValueError:
        value = _CONSTANTS.get(text, text)
    return value if isinstance(value, str) or not isinstance(default, str) else text
