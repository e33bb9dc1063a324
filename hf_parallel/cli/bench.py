"""`hf-parallel bench`: the benchmarks of the repository that contains this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def run(arguments: Sequence[str]) -> int:
    """Run `python -m benchmarks` and return its exit status."""
    if not (REPOSITORY / "benchmarks/__main__.py").is_file():
        raise ValueError(
            "the benchmarks are not in the installed package: clone the repository, and `make bench` in it"
        )
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode
