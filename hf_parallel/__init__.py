"""Parallel generation over a shared KV cache, for Hugging Face Transformers.

Public names are imported when they are first used (PEP 562), as the import of torch takes seconds. `__init__.pyi` lists
them with their modules. CONTRIBUTING.md has the folders, and the way of a call from `generate` to a kernel.
"""

import ast
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

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


class _PipelineFinder:
    """Registers `pipeline("parallel-text-generation")` as soon as transformers' pipelines have been imported."""

    name = "transformers.pipelines"

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            import_module("hf_parallel.pipelines")

        spec.loader.exec_module = execute_and_register
        return spec


if _PipelineFinder.name in sys.modules:
    import_module("hf_parallel.pipelines")
else:
    sys.meta_path.insert(0, _PipelineFinder())
