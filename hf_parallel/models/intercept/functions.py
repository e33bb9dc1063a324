"""Copies of functions in which global names mean something else.

Attention layers call `apply_rotary_pos_emb` by its name in the module that defines the layer. Nothing in Transformers
exchanges it for one model: the attention function receives queries and keys that are rotated already, and
`kernelize` needs the library `kernels` and replaces the function for all models of the process. So a layer gets
a copy of its class's `forward` with other globals, for as long as `replaced_forwards` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

Replacement = Callable[[Any], Any]
"""Returns what takes the place of a function, of a module that stands for one, or of a module of functions, if any."""


def with_other_globals(function: Any, replacement: Replacement) -> FunctionType | None:
    """Return a copy of a function in which global names of functions and modules mean what `replacement` returns.

    Return None if there is nothing to replace, or a decorator hides the function. A decorator that is a function
    itself is copied, too. While Dynamo traces the copy, it runs the function: Dynamo looks for globals in the module.
    """
    if not isinstance(function, FunctionType):
        return None
    decorated = getattr(function, "__wrapped__", None)
    if decorated is not None:
        inner = with_other_globals(decorated, replacement)
        return None if inner is None else _decorating(function, decorated, inner)
    replaced: dict[str, Any] = {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType | nn.Module | ModuleType):  # `kernels` makes modules of functions
            other = replacement(value)
            if other is not None:
                replaced[name] = other
    if not replaced:
        return None
    copy = _copy(function, {**function.__globals__, **replaced}, function.__closure__)

    @wraps(function)
    def function_of_call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return copy(*args, **kwargs)

    return function_of_call  # type: ignore[return-value]


def _decorating(decorator: FunctionType, plain: Any, other: Any) -> FunctionType | None:
    """Return a copy of what a decorator has made of the function `plain`, for the function `other`."""
    cells = decorator.__closure__ or ()
    if not any(cell.cell_contents is plain for cell in cells):
        return None
    closure = tuple(CellType(other) if cell.cell_contents is plain else cell for cell in cells)
    return wraps(decorator)(_copy(decorator, decorator.__globals__, closure))  # type: ignore[return-value]


def _copy(function: FunctionType, global_names: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, global_names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
