"""Arguments of functions, such as a model's `forward`, whose inspection takes as long as a small decode step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from transformers import GenerationMixin, PreTrainedModel


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return a function's arguments by name, without `self`; methods of classes are inspected once."""
    owner = getattr(function, "__self__", None)
    if owner is None or function.__name__ in vars(owner):  # replaced on this object alone
        return inspect.signature(function).parameters
    return _of_method(function.__func__)


def takes(function: Any, name: str) -> bool:
    """Return whether a function takes an argument of this name, or any."""
    known = parameters_of(function)
    return name in known or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())


CACHE = "cache" if "cache" in parameters_of(GenerationMixin.prepare_inputs_for_generation) else "past_key_values"
"""Transformers' name for the cache, as an argument and in outputs: `past_key_values` before 5.24."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument of `model.forward` that takes the cache."""
    known = parameters_of(model.forward)
    for name in (CACHE, "cache_params"):
        if name in known:
            return name
    return CACHE


@cache
def _of_method(method: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(method).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}
