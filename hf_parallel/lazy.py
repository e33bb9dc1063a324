"""Packages whose public names are imported when they are first used (PEP 562)."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, whose `__init__.pyi` lists its names with modules."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {}  # by name
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                modules[alias.name] = node.module
    names = sorted(modules)

    def getattr_(name: str) -> object:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module == package:
            value: object = import_module(f"{package}.{name}")
        else:
            value = getattr(import_module(module), name)
        vars(import_module(package))[name] = value
        return value

    def dir_() -> list[str]:
        return list(names)

    return getattr_, dir_, names
