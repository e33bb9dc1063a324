"""What the figures were measured on."""

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
"""What may be installed or not, and makes a difference."""


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, the versions and the date, ready for JSON."""
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
    """Version of a package, or why it cannot be imported."""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as error:  # a package that is there but broken says more than one that is not
        return f"none: {error}"


def _cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
