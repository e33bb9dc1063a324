"""RMSNorm, rotary embeddings and activations on a CPU, each computed by one call of a C kernel in float32.

A decode step of a small model spends as long between its linear layers as in them. What a module computes is found by
comparing it with the kernel on random inputs, never by its name. One comparison stands for other modules only if they
have the same class and settings, and no other state beside the weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from inspect import signature
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import native
from hf_parallel.models.cpu.gates import calls_gates, gate, with_gates
from hf_parallel.models.cpu.linear import linear_layers, pass_library
from hf_parallel.models.cpu.own_products import own_products
from hf_parallel.models.intercept.functions import with_other_globals
from hf_parallel.models.intercept.modules import Forward, replaced_forwards

RotaryFunction = Callable[..., Any]
"""`(q, k, cos, sin)`, or `(q, k, cos + i sin)` -> rotated queries and keys.

A function, or a module that `kernels` has made of one.
"""
_norms: dict[object, Forward | None] = {}  # by class and settings: compiled layers share a graph if they share these
_activations: dict[object, Forward | None] = {}  # likewise
_VALUES = (bool, int, float, str, type(None), torch.dtype)
"""Types of settings that are equal if their values are."""
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


@contextmanager
def fast_layers(model: nn.Module) -> Iterator[None]:
    """Compute norms, rotary embeddings and activations with the C kernels, within forward passes over a block cache.

    Includes `linear_layers` and `own_products`. Other threads, autocast, other dtypes, and calls with gradients use the
    model's own code, except those in a `kernel_pass` that records gradients.
    """
    with (
        linear_layers(model),
        replaced_forwards(own_products(model)),
        replaced_forwards(_fast_forwards(model)),
    ):
        yield


def _fast_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    if not native.is_available():
        return
    with_fast_functions = cache(_with_fast_functions)  # for this call: its globals are a copy of a module's
    for module in all_modules(model):
        if "forward" in vars(module):
            continue
        forward = _fast_norm(module) or _fast_activation(module) or with_fast_functions(type(module).forward)
        if forward is not None:
            yield module, forward


def _with_fast_functions(forward: object) -> Forward | None:
    """Return a copy of a `forward` whose rotary function and gates are the kernels'; None if it calls none of them."""
    has_gates = calls_gates(forward)

    def replacement(value: Any) -> Any:
        if isinstance(value, ModuleType):
            return with_gates(value) if has_gates else None
        return _fast_rotary(value) or _fast_complex_rotary(value)

    return with_other_globals(forward, replacement)


# Norms


def _fast_norm(module: nn.Module) -> Forward | None:
    """Return the `forward` of an RMSNorm by the kernel; None for other modules."""
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.dim() != 1 or len(module._parameters) > 1 or module._modules:
        return None
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
        return None
    settings = _settings(module)
    if settings is None:
        return None
    key = type(module), type(module).forward, len(weight), repr(settings)
    if key not in _norms:
        candidates = [value for value in settings.values() if type(value) is float]
        _norms[key] = _match_norm(module, len(weight), candidates)
    return _norms[key]


def _settings(module: nn.Module) -> dict[str, object] | None:
    """Return a module's attributes by name; None if it has buffers, or attributes that are not plain values."""
    settings = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    if module._buffers or not all(_is_value(value) for value in settings.values()):
        return None
    return settings


def _is_value(setting: object) -> bool:
    if isinstance(setting, tuple):
        return all(_is_value(part) for part in setting)
    return type(setting) in _VALUES


def _match_norm(module: nn.Module, size: int, candidates: list[float]) -> Forward | None:
    """Return the `forward` by the kernel with whose results the module's own agree, for one of these epsilons."""
    generator = torch.Generator().manual_seed(0)
    units = torch.randn(4, size, generator=generator, dtype=torch.float32)
    weight = torch.randn(1, size, generator=generator, dtype=torch.float32)[0]
    for eps in candidates:
        # Where eps matters, and where a limit of the inputs would.
        scales = units.new_tensor([[1.0], [eps**0.5], [10 * eps**0.5], [1e5]])
        x = units * scales
        expected = _outcome(partial(functional_call, module, {"weight": weight}, (x,)))
        for offset in (0.0, 1.0):
            if _are_equal(expected, native.rms_norm(x, weight, eps, offset)):
                return _norm_forward(type(module).forward, size, eps, offset)
    return None


def _norm_forward(plain: Forward, size: int, eps: float, offset: float) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_pass = not torch.compiler.is_compiling() and pass_library.get()  # Dynamo cannot read the variable
        if not is_pass or len(args) != 1 or kwargs:  # some norms take a gate, too
            return plain(self, *args, **kwargs)
        x = args[0]
        weight = self._parameters["weight"]
        is_float32 = type(x) is torch.Tensor and x.dtype == torch.float32 and x.device.type == "cpu"
        if not is_float32 or x.shape[-1] != size or weight is None or weight.dtype != torch.float32:
            return plain(self, x)
        if torch.is_grad_enabled():
            return _Norm.apply(x, weight, self, plain, eps, offset)
        return native.rms_norm(x, weight, eps, offset)

    return forward


class _Norm(torch.autograd.Function):
    """A norm by the kernel, whose gradients are those of the module's own code."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: nn.Module, plain: Forward, eps: float, offset: float
    ) -> torch.Tensor:
        """Return the norm."""
        ctx.save_for_backward(x, weight)
        ctx.plain = partial(_with_weight, module, plain)
        return native.rms_norm(x, weight, eps, offset)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input and weight."""
        leaves = []
        for tensor, is_needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False):
            leaves.append(tensor.detach().requires_grad_(is_needed))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            gradients = iter(torch.autograd.grad(ctx.plain(*leaves), wanted, grad_outputs))
        of_tensors = [next(gradients) if leaf.requires_grad else None for leaf in leaves]
        return (*of_tensors, None, None, None, None)


def _with_weight(module: nn.Module, plain: Forward, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Call the module's own `forward` with another weight, which other threads that compute the module do not see."""
    other = copy.copy(module)
    vars(other)["_parameters"] = {"weight": weight}
    return plain(other, x)


# Activations


def _fast_activation(module: nn.Module) -> Forward | None:
    """Return the `forward` of an activation by the kernel; None for other modules."""
    if module._parameters or module._buffers or module._modules:
        return None
    settings = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    if not all(_is_value(value) or _is_function(value) for value in settings.values()):
        return None
    key = type(module), type(module).forward, repr(sorted(settings.items()))
    if key not in _activations:
        _activations[key] = _match_activation(module)
    return _activations[key]


def _is_function(setting: object) -> bool:
    """Whether a setting is a function, or one with some arguments: it is equal to those with the same `repr`."""
    if isinstance(setting, partial):
        return _is_function(setting.func) and all(map(_is_value, (*setting.args, *setting.keywords.values())))
    return isinstance(setting, FunctionType | BuiltinFunctionType)


def _match_activation(module: nn.Module) -> Forward | None:
    """Return the `forward` by the kernel with whose results the module's own agree."""
    far = torch.tensor([-1e4, -100, 100, 1e4], dtype=torch.float32)
    x = torch.cat([torch.linspace(-12, 12, 97, dtype=torch.float32), far])
    expected = _outcome(partial(module, x))
    for activation in native.ACTIVATIONS:
        if _are_equal(expected, native.activate(x, activation)):
            return _activation_forward(type(module).forward, activation)
    return None


def _activation_forward(plain: Forward, activation: str) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return gate(activation, partial(plain, self))(*args, **kwargs)

    return forward


# Rotary embeddings


@lru_cache(maxsize=1024)
def _fast_rotary(plain: RotaryFunction) -> RotaryFunction | None:
    """Return a function that rotates queries and keys by the kernel; None if `plain` does something else."""
    if _num_required(plain) != 4 or _rotary_style(plain, heads=4, kv_heads=2, dim=16) is None:
        return None

    def fast(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_pass = not torch.compiler.is_compiling() and pass_library.get()  # Dynamo cannot read the variable
        records = torch.is_grad_enabled()  # PyTorch computes the same bits, with gradients
        if not is_pass or args or kwargs or records or not _are_packed_heads(q, k, cos, sin):
            return plain(q, k, cos, sin, *args, **kwargs)
        style = _rotary_style(plain, q.shape[1], k.shape[1], q.shape[3])
        if style is None:
            return plain(q, k, cos, sin)
        return native.rotate_heads(q, k, cos.contiguous(), sin.contiguous(), style)

    return fast


def _num_required(function: RotaryFunction) -> int:
    """Return the number of positional arguments that a function requires."""
    parameters = signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(parameter.default is parameter.empty for parameter in positional)


def _are_packed_heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the arguments are `[1, heads, T, head_dim]` and `[1, T, head_dim]`, in float32 on the CPU."""
    if len(q.shape) != 4 or not len(q) == len(k) == 1:
        return False
    tokens_and_dim = q.shape[2:]
    if k.shape[2:] != tokens_and_dim or not cos.shape == sin.shape == (1, *tokens_and_dim):
        return False
    if not torch.Tensor is type(q) is type(k) is type(cos) is type(sin):
        return False
    if not torch.float32 == q.dtype == k.dtype == cos.dtype == sin.dtype:
        return False
    return q.device.type == "cpu" and bool(q.device == k.device == cos.device == sin.device)


@lru_cache(maxsize=1024)
def _rotary_style(plain: RotaryFunction, heads: int, kv_heads: int, dim: int) -> bool | None:
    """Return whether a function rotates heads of these sizes in adjacent pairs, or in halves; None: as neither."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, 3, dim), (kv_heads, 3, dim), (3, dim), (3, dim)
    q, k, cos, sin = (torch.randn(1, *shape, generator=generator, dtype=torch.float32) for shape in shapes)
    expected = _outcome(partial(plain, q, k, cos, sin))
    for style in (False, True):
        if _are_equal(expected, native.rotate_heads(q, k, cos, sin, style)):
            return style
    return None


@lru_cache(maxsize=1024)
def _fast_complex_rotary(plain: RotaryFunction) -> RotaryFunction | None:
    """Return a function that rotates adjacent pairs as complex numbers do; None if `plain` does something else.

    PyTorch's product of complex numbers has other bits for contiguous tensors than for others, so that those of a token
    depend on how many a pass has.
    """
    if _num_required(plain) != 3:
        return None
    is_by_head = {by_head for by_head in (True, False) if _rotates_as_complex(plain, by_head)}
    if len(is_by_head) != 1:
        return None
    (by_head,) = is_by_head

    def fast(q: torch.Tensor, k: torch.Tensor, rotation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_pass = not torch.compiler.is_compiling() and pass_library.get()
        if not is_pass or args or kwargs or not _is_complex_rotation(q, k, rotation, by_head):
            return plain(q, k, rotation, *args, **kwargs)
        return _rotate_as_complex(q, k, rotation, by_head)

    return fast


def _is_complex_rotation(q: torch.Tensor, k: torch.Tensor, rotation: torch.Tensor, by_head: bool) -> bool:
    """Whether the arguments are heads on the CPU, and `[1, T, head_dim / 2]` complex numbers that rotate them."""
    if len(q.shape) != 4 or len(k.shape) != 4 or rotation.dtype != torch.complex64 or rotation.device.type != "cpu":
        return False
    shape = 1, q.shape[2 if by_head else 1], q.shape[3] // 2
    return rotation.shape == shape and len(q) == len(k) == 1 and q.device == k.device == rotation.device


def _rotate_as_complex(
    q: torch.Tensor, k: torch.Tensor, rotation: torch.Tensor, by_head: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate adjacent pairs of `q` and `k`, `[1, heads, T, head_dim]`, or `[1, T, heads, head_dim]`, in float32.

    The kernel, and PyTorch where gradients are recorded, compute the same bits: each product and sum is rounded.
    """
    cos = rotation.real
    sin = rotation.imag
    if torch.is_grad_enabled():
        heads_dim = 1 if by_head else 2
        cos = cos.unsqueeze(heads_dim)
        sin = sin.unsqueeze(heads_dim)
        return _rotate_pairs(q, cos, sin), _rotate_pairs(k, cos, sin)
    cos = cos.repeat_interleave(2, dim=-1)
    sin = sin.repeat_interleave(2, dim=-1)
    if by_head:
        rotated_q, rotated_k = native.rotate_heads(q.float(), k.float(), cos, sin, interleaved=True)
        return rotated_q.type_as(q), rotated_k.type_as(k)
    transposed = q.float().transpose(1, 2), k.float().transpose(1, 2)
    rotated_q, rotated_k = native.rotate_heads(*transposed, cos, sin, interleaved=True)
    return rotated_q.transpose(1, 2).type_as(q), rotated_k.transpose(1, 2).type_as(k)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).type_as(x)


def _rotates_as_complex(plain: RotaryFunction, by_head: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 3, 16), (1, 2, 3, 16)) if by_head else ((1, 3, 4, 16), (1, 3, 2, 16))
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    rotation = torch.randn(1, 3, 8, generator=generator, dtype=torch.complex64)
    expected = _outcome(partial(plain, q, k, rotation))
    with torch.no_grad():
        return _are_equal(expected, _rotate_as_complex(q, k, rotation, by_head))


# Comparisons


def _outcome(function: Callable[[], object]) -> object:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function()
    except Exception:  # code that computes something else need not accept these arguments
        return None


def _are_equal(result: object, expected: object) -> bool:
    try:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    except (AssertionError, TypeError):
        return False
    return True
