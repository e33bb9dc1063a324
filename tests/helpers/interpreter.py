"""Makes Triton's interpreter faster; imported by the tests that run in it.

At each call of a function of a kernel, the interpreter lists all members of `triton.language` to find those that it
replaces, which takes a third of its time. Here it lists them once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def _builtins(owner: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _patch_builtin(owner: Any, *given: Any) -> None:
    for name in _builtins(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):  # not replaced yet
            interpreter._patch_attr(owner, name, member, *given)


if hasattr(interpreter, "_patch_builtin"):
    interpreter._patch_builtin = _patch_builtin


@contextmanager
def products_row_by_row() -> Iterator[None]:
    """Let `tl.dot` add the products of each row in one order, as tensor cores do.

    The last bits of NumPy's product of a row depend on the place of the row among the others.
    """
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *given: Any) -> Any:
        out = d.data.copy()
        left, right = a.data.astype(out.dtype), b.data.astype(out.dtype)
        for k in range(left.shape[-1]):
            out += left[..., k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(out, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = plain
