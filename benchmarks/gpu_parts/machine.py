"""Description of the machine and the versions."""

from __future__ import annotations

import importlib
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_parallel
from hf_parallel import kernels

PACKAGES = ("triton", "flashinfer", "flash_attn")
"""Optional packages that affect the figures."""


def describe(device: torch.device) -> dict[str, Any]:
    """Return machine, versions and date, ready for JSON."""
    about: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "hf_parallel": hf_parallel.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": kernels.select_backend(device),
        "backends": [str(backend) for backend in kernels.backends()],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return about


def _version(name: str) -> str:
    """Return the version of a package, or the reason why it cannot be imported."""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as error:  # an installed package can fail to import, too
        return f"none: {error}"


def _cpu_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
