"""Other code for single modules: their `forward`, or their whole call. Other instances of a class keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
"""A `forward` as a function, which takes the module first."""

_CALL = "_compiled_call_impl"
"""Attribute that `nn.Module.__call__` calls instead of the module's own code, hooks included, unless it is None."""


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Give modules another `forward`. All threads see it; it must run the module's own code where it does not apply."""
    replaced = [(module, MethodType(forward, module)) for module, forward in forwards]
    try:
        for module, method in replaced:
            vars(module)["forward"] = method
        yield
    finally:
        for module, method in replaced:
            if vars(module).get("forward") is method:  # unless it was replaced meanwhile
                del vars(module)["forward"]


class InstalledCall(partial[object]):
    """Call of a module that this package has installed. All threads see it. Copies and pickles do not have it."""


def install_call(module: nn.Module, call: InstalledCall) -> None:
    """Let a module run `call`, which finds the module's own code in `_call_impl`."""
    vars(module)[_CALL] = call


def remove_call(module: nn.Module, kind: type[InstalledCall]) -> None:
    """Remove a call of this kind, if the module has one."""
    if has_call(module, kind):
        del vars(module)[_CALL]


def has_call(module: nn.Module, kind: type[InstalledCall]) -> bool:
    """Return whether a call of this kind is installed on a module."""
    return isinstance(vars(module).get(_CALL), kind)


def remove_hooks(module: nn.Module) -> None:
    """Remove the forward hooks that this package has registered on a module, for more than a pass."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in [*hooks.items()]:
            function = hook.func if isinstance(hook, partial) else hook
            if getattr(function, "__module__", "").startswith("hf_parallel."):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


@contextmanager
def gradient_checkpointing_disabled(model: nn.Module) -> Iterator[None]:
    """Disable gradient checkpointing, which drops the cache in training mode and has no use without gradients."""
    layers: list[Any] = []
    if model.training:
        layers += [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for layer in layers:
            layer.gradient_checkpointing = False
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


@contextmanager
def tensor_attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the attributes in which modules keep states of their last pass."""
    before = tensor_attributes(model)
    try:
        yield
    finally:
        for path, value in tensor_attributes(model).items():
            if value is not before.get(path):
                owner, _, attribute = path.rpartition(".")
                setattr(model.get_submodule(owner), attribute, before.get(path))


def tensor_attributes(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of modules that are, or may become, tensors but neither parameters nor buffers."""
    tensors: dict[str, Any] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if value is None or isinstance(value, torch.Tensor):
                tensors[f"{name}.{attribute}"] = value
    return tensors
