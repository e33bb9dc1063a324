"""RMSNorm and rotary embeddings on a CPU, each computed by one call of a C kernel in float32.

A decode step of a small model spends as long between its linear layers as in them. What a module computes is found by
comparing it with the kernel on random inputs, never by its name. One comparison stands for other modules only if they
have the same class and settings, and no other state beside the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial, wraps
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import native
from hf_parallel.models.cpu.linear import linear_layers, pass_library, replaced_forwards

Forward = Callable[..., Any]
_norms: dict[object, Forward | None] = {}  # by class and settings: compiled layers share a graph if they share these
_VALUES = (bool, int, float, str, type(None), torch.dtype)
"""Types of settings that are equal if their values are."""
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


@contextmanager
def fast_layers(model: nn.Module) -> Iterator[None]:
    """Compute a model's norms and rotary embeddings with the C kernels, within forward passes over a block cache.

    Includes `linear_layers`. Other threads, calls with gradients, autocast, and other dtypes use the model's own code.
    """
    with linear_layers(model), replaced_forwards(_fast_forwards(model)):
        yield


def _fast_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    with_fast_rotary = cache(_with_fast_rotary)  # for this call: its names are a copy of a module's
    for module in all_modules(model) if native.is_available() else []:
        forward = _fast_norm(module) or with_fast_rotary(type(module).forward)
        if forward is not None and "forward" not in vars(module):
            yield module, forward


def _is_fast(x: torch.Tensor, size: int) -> bool:
    """Whether the kernels compute a layer of `size` inputs in the running pass."""
    if torch.compiler.is_compiling() or not pass_library.get():  # the former first: Dynamo cannot read the variable
        return False
    is_plain = type(x) is torch.Tensor and x.dtype == torch.float32
    return is_plain and x.shape[-1] == size and x.device.type == "cpu"


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
        _norms[key] = _match_norm(module, len(weight), [eps for eps in settings.values() if type(eps) is float])
    return _norms[key]


def _settings(module: nn.Module) -> dict[str, object] | None:
    """Return a module's attributes by name; None if it has buffers, or attributes that are not plain values."""
    settings = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    is_plain = not module._buffers and all(_is_value(value) for value in settings.values())
    return settings if is_plain else None


def _is_value(setting: object) -> bool:
    if isinstance(setting, tuple):
        return all(_is_value(part) for part in setting)
    return type(setting) in _VALUES


def _match_norm(module: nn.Module, size: int, candidates: list[float]) -> Forward | None:
    plain, generator = type(module).forward, torch.Generator().manual_seed(0)
    units, (given,) = (torch.randn(n, size, generator=generator, dtype=torch.float32) for n in (4, 1))
    for eps in candidates:
        # Where eps matters, and where a limit of the inputs would.
        x = units * units.new_tensor([[1.0], [eps**0.5], [10 * eps**0.5], [1e5]])
        found = _outcome(partial(functional_call, module, {"weight": given}, (x,)))
        for offset in (0.0, 1.0):
            if _are_equal(found, native.rms_norm(x, given, eps, offset)):
                return _norm_forward(plain, size, eps, offset)
    return None


def _norm_forward(plain: Forward, size: int, eps: float, offset: float) -> Forward:
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        weight = self._parameters["weight"]
        is_usual = len(given) == 1 and not named  # some norms take a gate, too
        if is_usual and _is_fast(given[0], size) and weight is not None and weight.dtype == torch.float32:
            return native.rms_norm(given[0], weight, eps, offset)
        return plain(self, *given, **named)

    return forward


def _with_fast_rotary(forward: Any) -> Forward | None:
    """Return a `forward` whose function for rotary embeddings is replaced by the kernel; None if it calls none."""
    if not isinstance(forward, FunctionType):
        return None
    if hasattr(forward, "__wrapped__"):
        return _with_fast_inner(forward)
    used = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    found = {name: _fast_rotary(one) for name, one in used.items() if isinstance(one, FunctionType)}
    fast = {name: function for name, function in found.items() if function is not None}
    names = {**forward.__globals__, **fast}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__

    @wraps(forward)
    def forward_of_call(*args: Any, **kwargs: Any) -> Any:  # Dynamo looks for names in the module
        return (forward if torch.compiler.is_compiling() else copy)(*args, **kwargs)

    return forward_of_call if fast else None


def _with_fast_inner(forward: FunctionType) -> Forward | None:
    """Return the same for a decorated `forward`: its decorator, such as one that renames an argument, is kept."""
    inner = forward.__wrapped__  # type: ignore[attr-defined]
    fast = _with_fast_rotary(inner)
    cells = forward.__closure__ or ()
    if fast is None or not any(cell.cell_contents is inner for cell in cells):
        return None
    closure = tuple(CellType(fast) if cell.cell_contents is inner else cell for cell in cells)
    copy = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return wraps(forward)(copy)


@lru_cache(maxsize=1024)
def _fast_rotary(plain: FunctionType) -> Forward | None:
    """Return a function `(q, k, cos, sin)` that rotates queries and keys by the kernel; None for other functions."""
    if plain.__code__.co_argcount - len(plain.__defaults__ or ()) != 4:
        return None
    if _rotary_style(plain, heads=4, kv_heads=2, dim=16) is None:
        return None

    def fast(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any) -> Any:
        is_usual = not (more or named) and len(q.shape) == 4 and len(q) == len(k) == 1
        is_usual = is_usual and cos.shape == sin.shape == (1, *q.shape[2:]) and k.shape[2:] == q.shape[2:]
        is_usual = is_usual and type(q) is type(k) is type(cos) is type(sin)
        is_usual = is_usual and q.dtype == k.dtype == cos.dtype == sin.dtype
        is_usual = is_usual and q.device == k.device == cos.device == sin.device
        if not is_usual or not _is_fast(q, cos.shape[-1]):
            return plain(q, k, cos, sin, *more, **named)
        style = _rotary_style(plain, q.shape[1], k.shape[1], q.shape[3])
        if style is None:
            return plain(q, k, cos, sin)
        return native.rotate_heads(q, k, cos.contiguous(), sin.contiguous(), style)

    return fast


@lru_cache(maxsize=1024)
def _rotary_style(plain: FunctionType, heads: int, kv_heads: int, dim: int) -> bool | None:
    """Return whether a function rotates heads of these sizes in adjacent pairs, or in halves; None: as neither."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, 3, dim), (kv_heads, 3, dim), (3, dim), (3, dim)
    q, k, cos, sin = (torch.randn(1, *shape, generator=generator, dtype=torch.float32) for shape in shapes)
    found = _outcome(partial(plain, q, k, cos, sin))
    for style in (False, True):
        if _are_equal(found, native.rotate_heads(q, k, cos, sin, style)):
            return style
    return None


def _outcome(function: Callable[[], object]) -> object:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function()
    except Exception:  # code that computes something else need not accept these arguments
        return None


def _are_equal(found: object, expected: object) -> bool:
    try:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    except (AssertionError, TypeError):
        return False
    return True
