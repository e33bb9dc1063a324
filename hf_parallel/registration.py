"""Registers the package's pipeline with Transformers, once `transformers.pipelines` has been imported.

`import hf_parallel` alone imports neither torch nor Transformers, which take seconds. It leaves a finder that waits for
the module that has the registry.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY = "transformers.pipelines"
"""The module that has the registry of pipelines."""
PIPELINES = "hf_parallel.pipelines"
"""The module that registers the pipeline when it is imported."""


def register_pipeline_once_imported() -> None:
    """Import `hf_parallel.pipelines` after `transformers.pipelines`: now, if it has been imported already."""
    if REGISTRY in sys.modules:
        import_module(PIPELINES)
    else:
        sys.meta_path.insert(0, AfterImport(REGISTRY, lambda: import_module(PIPELINES)))


class AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported, in the usual way. It is used once."""

    def __init__(self, module: str, function: Callable[[], object]) -> None:
        self.module = module
        self.function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders return, with a loader that calls the function."""
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self.function)
        return spec


class _CallingLoader(Loader):
    """A loader that calls a function after it has executed a module."""

    def __init__(self, loader: Loader, function: Callable[[], object]) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._function()
        except Exception as error:  # the module works without this package
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"hf_parallel is not registered with {module.__name__}: {reason}", RuntimeWarning, stacklevel=2
            )
