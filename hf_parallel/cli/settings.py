"""Settings of `hf-parallel generate`: read from options, told by `--settings`, checked before a model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.generation import MODES, ParallelConfig
from hf_parallel.generation.arguments import check_values
from hf_parallel.generation.config import SAMPLING, make_config, unknown_setting
from hf_parallel.generation.modes.hogwild.presets import EMBEDDED_PRESET

PLAIN = "generate"
"""Stands for no mode: what `generate` does by itself."""
GENERATION_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_new_tokens", int, "tokens of an answer; of a worker in hogwild (256)"),
    ("num_return_sequences", int, "answers per prompt (1)"),
    ("temperature", float, "of the sampling"),
    ("top_p", float, "sample from the likeliest tokens that have this probability together"),
    ("top_k", int, "sample from so many of the likeliest tokens"),
    ("repetition_penalty", float, "above 1: repeat less"),
)
"""Settings of `generate` that have an option: name, type, help."""
_DRAWING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of `generate` that have a sense only where tokens are drawn."""
_WRITTEN_OUT = {"True": True, "False": False, "None": None}
_PROCESSORS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "temperature": (TemperatureLogitsWarper, 1),
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1),
    "min_p": (MinPLogitsWarper, None),
    "typical_p": (TypicalLogitsWarper, 1),
    "epsilon_cutoff": (EpsilonLogitsWarper, 0),
    "eta_cutoff": (EtaLogitsWarper, 0),
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor, 1),
}
"""What `generate` makes of a setting, which refuses a value out of its range; the value at which it makes nothing."""


def describe(mode: str) -> str:
    """What a mode does, and what its settings mean and are by default."""
    if mode not in MODES:
        return "No mode: what `generate` of transformers does. Its settings: " + ", ".join(GENERATION_SETTINGS)
    cls = MODES[mode]
    classes = [of for of in cls.__mro__ if dataclasses.is_dataclass(of) and of is not object]
    texts = [inspect.cleandoc(of.__doc__ or "") for of in classes]
    defaults = [f"{field.name} = {_default(field)}" for field in dataclasses.fields(cls) if field.name in cls.fields()]
    return "\n\n".join([*texts, "Defaults\n--------\n" + "\n".join(defaults)])


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return repr(value)


def read_settings(options: argparse.Namespace) -> tuple[ParallelConfig | None, dict[str, Any]]:
    """The mode's config, None without a mode, and the arguments of `generate`.

    Raises
    ------
    ValueError
        Naming the setting, what was given and what is allowed.
    """
    cls = MODES.get(options.mode)
    preset = options.model is None and not options.no_preset
    settings: dict[str, Any] = {**SAMPLING} if preset and options.mode in ("hogwild", "self_consistency") else {}
    given = {} if options.seed is None else {"seed": options.seed}
    asked: dict[str, Any] = {}  # of `generate`
    named = _settings_with_options(options)
    for text in options.set:
        name, _, value = text.partition("=")
        if not _:
            raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
        if name in named:
            raise ValueError(f"--set {name} and {named[name]} are one setting, give one of them")
        if cls is not None and name == "logits_cache" and name in cls.fields():
            raise ValueError(f"--set cannot hold logits (got {text!r}); use --logits-cache FILE")
        if cls is not None and name in cls.fields() and name not in cls.not_stored:
            given[name] = parse(value, getattr(cls, name, None))
        elif name in GENERATION_SETTINGS:
            asked[name] = parse(value, getattr(GenerationConfig(), name))
        elif cls is None:
            raise ValueError(f"generate has no setting {name!r} (got {value!r})")
        else:
            raise unknown_setting(cls, name, value, GENERATION_SETTINGS)
    settings |= asked | _generation_options(options, asked)
    if settings.get("max_length") is None:
        settings.setdefault("max_new_tokens", 256)
    if not settings.get("do_sample", True):
        settings = {name: value for name, value in settings.items() if name not in _DRAWING}
    _check_generation(settings)
    if options.logits_cache is not None or options.mode == "resample":
        given["logits_cache"] = _logits_cache(options.logits_cache, cls)
    if cls is None:
        return None, settings
    return make_config(
        cls.mode, given, EMBEDDED_PRESET.settings if preset and options.mode == "hogwild" else None
    ), settings


def _check_generation(settings: dict[str, Any]) -> None:
    """Raise an error for what `generate` would refuse whatever the model."""
    check_values(settings)
    GenerationConfig(**{"do_sample": True, **settings})  # unless told, the model's own config may ask for sampling
    for name, (make, nothing) in _PROCESSORS.items():
        value = settings.get(name)
        if value is None or value == nothing:
            continue
        try:
            make(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is refused by generate: {error}") from error


def _settings_with_options(options: argparse.Namespace) -> dict[str, str]:
    """Settings that options give, and which."""
    names = [*(name for name, _, _ in GENERATION_OPTIONS), "seed"]
    named = {name: f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None}
    if options.greedy or options.sample:
        named["do_sample"] = "--greedy" if options.greedy else "--sample"
    return named


def _generation_options(options: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """What options say of the arguments of `generate`, and whether they or those `asked` for by --set draw tokens."""
    names = [name for name, _, _ in GENERATION_OPTIONS]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    drawing = [f"--{name.replace('_', '-')}" for name in _DRAWING if name in given]
    drawing += [f"--set {name}" for name in _DRAWING if asked.get(name) is not None]
    drawing += ["--sample"] * bool(options.sample)
    greedy = "--greedy" if options.greedy else "" if asked.get("do_sample", True) else "--set do_sample=False"
    if greedy and drawing:
        raise ValueError(f"{greedy} draws no tokens, so it cannot be combined with {', '.join(drawing)}")
    if greedy or drawing:
        given["do_sample"] = not greedy
    return given


GENERATION_SETTINGS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
"""What `generate` itself can be set to."""


def parse(text: str, default: Any) -> Any:
    """The value of a setting: JSON, `True`, `False` or `None`, or plain text, which a setting that is text remains.

    Parameters
    ----------
    text : str
    default : Any
        The setting's.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return _WRITTEN_OUT.get(text, text) if not isinstance(default, str) else text
    return value if isinstance(value, str) or not isinstance(default, str) else text


def _logits_cache(path: Path | None, cls: type[ParallelConfig] | None) -> LogitsCache:
    """The cache that a file holds, or a new one."""
    if cls is None or "logits_cache" not in cls.fields():
        raise ValueError(f"--logits-cache needs a mode that remembers logits, got {PLAIN if cls is None else cls.mode}")
    return LogitsCache.load(path) if path is not None and path.exists() else LogitsCache()
