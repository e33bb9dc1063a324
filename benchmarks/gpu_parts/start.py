"""Start of a process: the time by which its first call is longer than a later one.

It compiles and loads kernels, captures CUDA graphs, and compiles the model where the package does so. Each case is a
process of its own: the first with an empty folder of compiled code, the second with what the first one has written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from .cases import Bench, Case, Target, figure
from .timing import Deadline, OutOfTimeError

ROOT = Path(__file__).parents[2]
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name the folders of compiled code."""
PROCESSES = ("first", "second")


@dataclass(frozen=True)
class StartStage:
    """Settings and cases.

    Parameters
    ----------
    model : str
        Key of `CONFIGS`.
    rows, prefix, steps : int
        Size of the call.
    """

    share: ClassVar[float] = 0.13

    model: str = "Qwen3-8B"
    rows: int = 1
    prefix: int = 1024
    steps: int = 48

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield the first and the second process, which share a folder of compiled code."""
        with tempfile.TemporaryDirectory() as folder:
            for process in PROCESSES:
                settings = {"model": self.model, "rows": self.rows, "prefix": self.prefix, "process": process}
                yield Case(settings, partial(self._measure, bench, Path(folder)))

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        second = figure("start_seconds", lambda case: case["process"] == "second" and case.get("compile") is not False)
        return [Target("compiled decode: start of a second process, s", second, 5.0)]

    def _measure(self, bench: Bench, folder: Path) -> dict[str, Any]:
        device, dtype = bench.models.device, bench.models.dtype
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the process needs memory of its own
        settings = asdict(self) | {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
        folders = {variable: str(folder / variable) for variable in FOLDERS}
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, json.dumps(settings)],
                cwd=ROOT,
                env=os.environ | folders,
                capture_output=True,
                text=True,
                timeout=max(bench.deadline.left, 0.1),
            )
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        if done.returncode:
            raise RuntimeError(done.stderr[-1000:] or f"the process ended with status {done.returncode}")
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures


def main() -> int:
    """Measure calls in this process, with the settings of the argument, and print the figures as JSON."""
    from hf_parallel.models import compiled

    from .models import Models
    from .ways import shared_prefix

    settings = json.loads(sys.argv[1])
    if settings["device"] == "cpu":  # toy sizes
        compiled.COMPILER = "eager"
    began = time.perf_counter()
    model = Models(torch.device(settings["device"]), getattr(torch, settings["dtype"])).get(settings["model"])
    built = time.perf_counter()
    rows, prefix, steps = (settings[name] for name in ("rows", "prefix", "steps"))
    first, again = (shared_prefix(model, rows, prefix, steps, Deadline(3600)) for _ in range(2))
    figures = {
        "compile": first["stats"]["compiled_passes"] > 0,
        "build_seconds": built - began,
        "first_seconds": first["call_seconds"],
        "again_seconds": again["call_seconds"],
        "first_token_seconds": first["first_token_seconds"],
        "start_seconds": first["call_seconds"] - again["call_seconds"],
        "step_seconds": again["step_seconds"],
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
