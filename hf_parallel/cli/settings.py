"""Settings of `hf-parallel generate`: read from options and checked before a model is loaded."""

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
from hf_parallel.generation import MODES, ParallelConfig, Preset
from hf_parallel.generation.arguments import check_values
from hf_parallel.generation.config import check_setting_names, make_config

PLAIN = "generate"
"""Value of `--mode` for plain `generate`."""
GENERATION_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_new_tokens", int, "maximum number of new tokens of each row (256)"),
    ("num_return_sequences", int, "answers per prompt (1)"),
    ("temperature", float, "sampling temperature"),
    ("top_p", float, "sample from the most probable tokens whose probabilities sum to this"),
    ("top_k", int, "sample from this many of the most probable tokens"),
    ("repetition_penalty", float, "above 1: repeat less"),
)
"""Settings of `generate` that have an option: name, type, help."""
GENERATION_SETTINGS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
"""All settings of `generate`."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of `generate` that have an effect only with `do_sample=True`."""
_CONSTANTS = {"True": True, "False": False, "None": None}
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
"""The logits processor of a setting, which raises for a value out of range, and the value that disables it."""


def describe(mode: str) -> str:
    """Return what a mode does, and the meanings and defaults of its settings."""
    if mode not in MODES:
        return "No mode: plain `generate` of transformers. Its settings: " + ", ".join(GENERATION_SETTINGS)
    cls = MODES[mode]
    classes = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    texts = [inspect.cleandoc(base.__doc__ or "") for base in classes]
    defaults = [f"{field.name} = {_default(field)}" for field in dataclasses.fields(cls) if field.init]
    return "\n\n".join([*texts, "Defaults\n--------\n" + "\n".join(defaults)])


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return repr(value)


def embedded_preset(options: argparse.Namespace) -> Preset:
    """Return the mode's preset for the embedded model; an empty one for other models and with `--no-preset`."""
    presets = MODES[options.mode].presets if options.mode in MODES else {}
    return presets.get("embedded", Preset()) if options.model is None and not options.no_preset else Preset()


def read_settings(options: argparse.Namespace) -> tuple[ParallelConfig | None, dict[str, Any]]:
    """Return the mode's config (None without a mode) and the arguments of `generate`.

    Raises
    ------
    ValueError
        Naming the setting, the value and what is allowed.
    """
    cls = MODES.get(options.mode)
    preset = embedded_preset(options)
    of_mode, of_generate = _split_set_options(options, cls)
    settings = {**preset.generation, **of_generate, **_generation_options(options, of_generate)}
    if settings.get("max_length") is None:
        settings.setdefault("max_new_tokens", 256)
    if not settings.get("do_sample", True):
        settings = {name: value for name, value in settings.items() if name not in _SAMPLING}
    _check_generation(settings)
    if cls is None:
        if options.logits_cache is not None:
            raise ValueError(f"--logits-cache needs a mode with logits_cache, got --mode {PLAIN}")
        return None, settings
    if options.seed is not None:
        of_mode["seed"] = options.seed
    if options.logits_cache is not None or cls.needs_logits_cache:
        if "logits_cache" not in cls.fields():
            raise ValueError(f"--logits-cache needs a mode with logits_cache, got --mode {cls.mode}")
        of_mode["logits_cache"] = _load_logits_cache(options.logits_cache)
    return make_config(cls.mode, of_mode, preset.settings), settings


def _split_set_options(
    options: argparse.Namespace, cls: type[ParallelConfig] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of all `--set` options: settings of the mode, and settings of `generate`."""
    given = _given_options(options)
    of_mode: dict[str, Any] = {}
    of_generate: dict[str, Any] = {}
    for text in options.set:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
        if name in given:
            raise ValueError(f"--set {name} and {given[name]} are the same setting, give one of them")
        if cls is not None and name in cls.not_stored:
            hint = "; use --logits-cache FILE" if name == "logits_cache" else ""
            raise ValueError(f"--set cannot hold the object {name} (got {text!r}){hint}")
        if cls is not None and name in cls.fields():
            of_mode[name] = parse(value, getattr(cls, name, None))
        elif name in GENERATION_SETTINGS:
            of_generate[name] = parse(value, getattr(GenerationConfig(), name))
        elif cls is None:
            raise ValueError(f"generate has no setting {name!r} (got {value!r})")
        else:
            check_setting_names(cls, {name: value}, GENERATION_SETTINGS)
    return of_mode, of_generate


def _check_generation(settings: dict[str, Any]) -> None:
    """Raise `ValueError` for values that `generate` rejects for any model."""
    check_values(settings)
    GenerationConfig(**{"do_sample": True, **settings})  # the model's own config may enable sampling
    for name, (processor, disabled) in _PROCESSORS.items():
        value = settings.get(name)
        if value is None or value == disabled:
            continue
        try:
            processor(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is invalid: {error}") from error


def _given_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the names of settings that were given as options, with those options."""
    names = [*(name for name, _, _ in GENERATION_OPTIONS), "seed"]
    given = {name: f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None}
    if options.greedy or options.sample:
        given["do_sample"] = "--greedy" if options.greedy else "--sample"
    return given


def _generation_options(options: argparse.Namespace, of_generate: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `generate` that were given as options, with `do_sample` if any setting implies it."""
    names = [name for name, _, _ in GENERATION_OPTIONS]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sampling = [f"--{name.replace('_', '-')}" for name in _SAMPLING if name in given]
    sampling += [f"--set {name}" for name in _SAMPLING if of_generate.get(name) is not None]
    sampling += ["--sample"] * bool(options.sample)
    greedy = "--greedy" if options.greedy else "" if of_generate.get("do_sample", True) else "--set do_sample=False"
    if greedy and sampling:
        raise ValueError(f"{greedy} disables sampling, so it cannot be combined with {', '.join(sampling)}")
    if greedy or sampling:
        given["do_sample"] = not greedy
    return given


def parse(text: str, default: Any) -> Any:
    """Parse the value of a setting: JSON, `True`, `False` or `None`, or plain text.

    Parameters
    ----------
    text : str
    default : Any
        Default of the setting. If it is a string, the value is a string too.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return _CONSTANTS.get(text, text) if not isinstance(default, str) else text
    return value if isinstance(value, str) or not isinstance(default, str) else text


def _load_logits_cache(path: Path | None) -> LogitsCache:
    return LogitsCache.load(path) if path is not None and path.exists() else LogitsCache()
