"""Writes the Triton kernel of block attention as a repository for the Kernel Hub of Hugging Face.

    python kernel_hub/build.py FOLDER [--backend cuda]

The files come from `hf_parallel/kernels/`, with relative imports, and from this folder: nothing is maintained twice.
The layout is that of kernel-builder for a kernel without compiled code (`torch-noarch`): sources in `torch-ext/`, and
the same with metadata in `build/torch-BACKEND/`, from which `kernels.get_local_kernel(FOLDER)` loads it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE.parent / "hf_parallel" / "kernels"
NAME = "block-attention"
MODULE = NAME.replace("-", "_")
VERSION = 1  # of the interface, as the Kernel Hub counts
COPIED = ("plan.py", "rope.py", "storage.py", "work.py", "triton/kernels.py", "triton/launch.py", "triton/attend.py")
MINIMUM = "0.17.0"  # of the package `kernels`, with which the repository is tested
BACKENDS = ("cuda", "rocm", "xpu", "cpu")

MANIFEST = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 6
license = "Apache-2.0"
backends = ["cuda"]

[torch-noarch]
"""


def write(folder: Path, backend: str = "cuda") -> None:
    """Write the repository into a new or empty folder.

    Raises `FileExistsError` if the folder has files, and `ValueError` for an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} has files; name a new or empty folder")
    package = folder / "torch-ext" / MODULE
    package.mkdir(parents=True)
    for name in COPIED:
        source = KERNELS / name
        (package / source.name).write_text(with_relative_imports(source.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copy(HERE / "interface.py", package / "__init__.py")
    (folder / "build.toml").write_text(MANIFEST, encoding="utf-8")
    shutil.copy(HERE / "CARD.md", folder / "README.md")
    shutil.copy(HERE.parent / "LICENSE", folder)
    for kind in ("tests", "benchmarks"):
        shutil.copytree(HERE / kind, folder / kind, ignore=shutil.ignore_patterns("__pycache__"))
    variant = folder / "build" / f"torch-{backend}"
    shutil.copytree(package, variant)
    (variant / "metadata.json").write_text(json.dumps(metadata(variant, backend), indent=2) + "\n", encoding="utf-8")


def with_relative_imports(source: str) -> str:
    """Return a file of `hf_parallel.kernels` that imports its neighbors, all of which lie in one folder."""
    return re.sub(
        r"^from hf_parallel\.kernels\.(?:triton\.)?(\w+) import", r"from .\1 import", source, flags=re.MULTILINE
    )


def metadata(variant: Path, backend: str) -> dict[str, object]:
    """Return what the loader reads; `id`, the name of the imported module, differs for different sources."""
    sources = sorted(variant.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return {
        "id": f"_{MODULE}_{backend}_{digest}",
        "name": NAME,
        "version": VERSION,
        "license": "Apache-2.0",
        "kernels-minver": MINIMUM,
        "python-depends": [],
        "backend": {"type": backend},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the repository of the kernel for the Kernel Hub.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="cuda", choices=BACKENDS)
    options = parser.parse_args()
    write(options.folder, options.backend)
