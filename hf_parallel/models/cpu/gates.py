"""Activations and gates on a CPU, whose results do not depend on where a number lies in memory.

PyTorch computes the last numbers of a tensor, or of a thread's part, by other code than those before, and sigmoid,
SiLU, softplus and the tanh form of GELU then differ in the last bit. In a pass over a block cache, kernels compute
them: in the modules of activations (`elementwise.py`), and where a model's own code calls these functions.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_parallel.kernels import native
from hf_parallel.models.cpu.linear import pass_library

GateFunction = Callable[..., torch.Tensor]
_HALF = (torch.bfloat16, torch.float16)
_NAMES = {"sigmoid", "silu", "softplus", "gelu"}


def gate(activation: str, plain: GateFunction, **settings: Any) -> GateFunction:
    """Return an activation (`native.ACTIVATIONS`) by the kernel, for a function or module that computes the same.

    Calls with other arguments than `settings`, outside of passes and on other devices use `plain`. Gradients are
    `plain`'s, too.
    """

    def fast(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs != settings or not _is_fast(x):
            return plain(x, *args, **kwargs)
        if torch.is_grad_enabled() and x.requires_grad:
            return _GateWithGradients.apply(x, activation, plain, settings)  # type: ignore[no-any-return]
        return _activate(x, activation)

    return fast


def _is_fast(x: torch.Tensor) -> bool:
    """Whether the kernels compute an activation in the running pass."""
    if torch.compiler.is_compiling() or pass_library.get() != "native":  # first: Dynamo cannot read the variable
        return False
    return type(x) is torch.Tensor and x.device.type == "cpu" and (x.dtype == torch.float32 or x.dtype in _HALF)


def _activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    if x.dtype in _HALF:
        return native.activate(x.float(), activation).to(x.dtype)
    return native.activate(x, activation)


class _GateWithGradients(torch.autograd.Function):
    """An activation by the kernel, with PyTorch's gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, activation: str, plain: GateFunction, settings: dict[str, Any]
    ) -> torch.Tensor:
        """Return the activation."""
        ctx.save_for_backward(x)
        ctx.plain = plain
        ctx.settings = settings
        return _activate(x, activation)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the input."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(ctx.plain(x, **ctx.settings), x, grad_outputs)
        return gradient, None, None, None


_SIGMOID = gate("sigmoid", torch.sigmoid)
_SILU = gate("silu", F.silu)
_SOFTPLUS = gate("softplus", F.softplus)
_GELU = gate("gelu_tanh", F.gelu, approximate="tanh")
GATES: dict[object, GateFunction] = {
    torch.sigmoid: _SIGMOID,
    torch.Tensor.sigmoid: _SIGMOID,
    F.silu: _SILU,
    F.softplus: _SOFTPLUS,
    F.gelu: _GELU,
}
"""Functions of PyTorch, and what takes their place in a pass."""


class _Namespace:
    """Stands for a module of functions, some of which mean something else."""

    def __init__(self, module: ModuleType, **members: Any) -> None:
        self._module = module
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_FUNCTIONAL = _Namespace(F, sigmoid=_SIGMOID, silu=_SILU, softplus=_SOFTPLUS, gelu=_GELU)
_NN = _Namespace(nn, functional=_FUNCTIONAL)
_TORCH = _Namespace(torch, sigmoid=_SIGMOID, nn=_NN)
_NAMESPACES: dict[object, _Namespace] = {F: _FUNCTIONAL, nn: _NN, torch: _TORCH}


def with_gates(module: ModuleType) -> Any:
    """Return what stands for `torch`, `nn` or `F` in code that calls gates; None for other modules."""
    return _NAMESPACES.get(module)


def calls_gates(function: object) -> bool:
    """Whether the code of a function, or of what it decorates, mentions gates."""
    return not names_in(function).isdisjoint(_NAMES)


@cache
def names_in(function: Any) -> frozenset[str]:
    """Return the global names and attributes in the code of a function, and of what it decorates, and `@`."""
    names: set[str] = set()
    while isinstance(function, FunctionType):
        pending = [function.__code__]
        while pending:
            code = pending.pop()
            names.update(code.co_names)
            if any(_is_matrix_product(instruction) for instruction in dis.get_instructions(code)):
                names.add("@")
            pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        function = getattr(function, "__wrapped__", None)
    return frozenset(names)


def _is_matrix_product(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"  # Python 3.10; later
