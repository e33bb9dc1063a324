"""Positions of a model's rotary embeddings in one pass, whatever positions the model gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import nn

_rotated_to: ContextVar[torch.Tensor | None] = ContextVar("hf_parallel_rotated_to", default=None)


@contextmanager
def rotating_to(modules: Sequence[nn.Module], position_ids: torch.Tensor) -> Iterator[None]:
    """Make rotary embeddings, `rotary_modules`, rotate to `position_ids` `[1, T]` whatever positions a model has."""
    hooks = [module.register_forward_pre_hook(_give_positions, with_kwargs=True) for module in modules]
    token = _rotated_to.set(position_ids)
    try:
        yield
    finally:
        _rotated_to.reset(token)
        for hook in hooks:
            hook.remove()


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute the rotary embeddings of a model."""
    modules = []
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        if any(name.endswith("inv_freq") for name in names):
            modules.append(module)
    return modules


def _give_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position_ids = _rotated_to.get()
    if position_ids is None:  # in another thread
        return None
    bound = signature(module.forward).bind(*args, **kwargs)
    bound.arguments["position_ids"] = position_ids
    return bound.args, bound.kwargs
