"""Reports of benchmarks: set-up, machine, JSON and tables. All benchmarks use them."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import hf_parallel
from hf_parallel.models.loading import load_model

DTYPES = ("float32", "bfloat16", "float16")
RESULTS = Path(__file__).parent / "results"


def set_up(options: argparse.Namespace) -> tuple[Any, Any]:
    """Load and enable the model of the options; return it with its tokenizer."""
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, getattr(torch, options.dtype), options.device, preset=False)
    return hf_parallel.enable(model), tokenizer


def about(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the first entries of a report."""
    return {"machine": machine(model), "model": options.model or "SmolLM2-135M-Instruct"}


def new_path(kind: str, quick: bool = False) -> Path:
    """Return a new path in the results folder."""
    return RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}-{kind}{'-quick' if quick else ''}.json"


def write(report: dict[str, Any], path: Path) -> None:
    """Write a report and the current load average."""
    report["machine"]["load_average_after"] = load_average()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def finish(
    console: Console, report: dict[str, Any], path: Path, show: Callable[[Console, dict[str, Any]], None]
) -> None:
    """Write a report and print it."""
    write(report, path)
    show(console, report)
    console.print(f"\nWritten to {path}", soft_wrap=True)


def machine(model: Any) -> dict[str, Any]:
    """Describe hardware, versions and load."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_parallel": hf_parallel.__version__,
        "load_average_before": load_average(),
    }


def cpu_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_average() -> list[float] | None:
    """Return the load averages of the last 1, 5 and 15 minutes, which reveal other work on the machine."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def table_of(title: str, *headings: str) -> Table:
    """Return an empty table whose first column holds names."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def number(way: dict[str, Any], name: str, factor: float, form: str) -> str:
    """Format a figure; empty if it was not measured."""
    return format(way[name] * factor, form) if name in way else ""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `set_up`."""
    parser.add_argument("--model", metavar="ID_OR_PATH", help="default: the embedded model")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="default: float32")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
