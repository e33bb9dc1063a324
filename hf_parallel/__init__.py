"""Parallel generation over a shared KV cache, for Hugging Face Transformers.

Public names are imported when they are first used (PEP 562), as the import of torch takes seconds. `__init__.pyi` lists
them with their modules. CONTRIBUTING.md has the folders, and the way of a call from `generate` to a kernel.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
"""Module of each public name."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    value = import_module(f"{__name__}.{name}") if module == __name__ else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]
