"""Reports of benchmarks: options, set-up, machine, targets, JSON and plain tables. All benchmarks use them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_parallel
from hf_parallel import kernels
from hf_parallel.models.loading import load_model

DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("triton", "flashinfer", "flash_attn")
"""Optional packages that affect figures of a GPU."""
RESULTS = Path(__file__).parent / "results"

Report = dict[str, Any]
Log = Callable[[str], None]
"""Prints a line about the progress."""


def new_parser(name: str, words: str | None, any_device: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; `any_device`: not only a CPU in float32."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=str(words).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    parser.add_argument("--model", metavar="ID_OR_PATH", help="default: the embedded model")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    parser.set_defaults(device="cpu", dtype="float32")
    if any_device:
        parser.add_argument("--device", default="cpu", help="default: cpu")
        parser.add_argument("--dtype", default="float32", choices=DTYPES, help="default: float32")
    return parser


def set_up(options: argparse.Namespace) -> tuple[Any, Any]:
    """Load and enable the model of the options; return it with its tokenizer."""
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, getattr(torch, options.dtype), options.device, preset=False)
    return hf_parallel.enable(model), tokenizer


def about(model: Any, options: argparse.Namespace) -> Report:
    """Return the first entries of a report."""
    name = options.model or "SmolLM2-135M-Instruct"
    return {"machine": machine(model.device, model.dtype), "model": name, "quick": options.quick}


def write(report: Report, path: Path) -> None:
    """Write a report and the current load average."""
    report["machine"]["load_average_after"] = load_average()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def new_path(kind: str, options: argparse.Namespace) -> Path:
    """Return the path of the options, or a new one in the results folder."""
    return options.output or RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}-{kind}{'-quick' * options.quick}.json"


def finish(report: Report, path: Path, show: Callable[[Report], None]) -> None:
    """Write a report and print it."""
    write(report, path)
    show(report)
    if "targets" in report:
        print(targets_table(report["targets"]))
    if report.get("quick"):
        print("(--quick: the figures are meaningless)")
    print(f"Written to {path}")


def machine(device: torch.device, dtype: torch.dtype) -> Report:
    """Describe hardware, versions and load."""
    found: Report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_parallel": hf_parallel.__version__,
        "backend": kernels.select_backend(device),
        "load_average_before": load_average(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "packages": {name: _version(name) for name in PACKAGES},
        }
    return found


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


def _version(name: str) -> str:
    """Return the version of a package, or the reason why it cannot be imported."""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as error:  # an installed package can fail to import, too
        return f"none: {error}"


class Table:
    """Columns of plain text: names on the left, figures aligned to the right."""

    def __init__(self, title: str, *headings: str) -> None:
        self.title, self.rows = title, [("", *headings)]

    def add_row(self, *cells: object) -> None:
        """Append a row; missing cells are empty."""
        self.rows.append((*map(str, cells), *[""] * (len(self.rows[0]) - len(cells))))

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in self.rows]
        return "\n".join([f"\n{self.title}", *("  ".join(line).rstrip() for line in lines)])


def number(way: Mapping[str, Any], name: str, factor: float, form: str) -> str:
    """Format a figure; empty if it was not measured."""
    return format(way[name] * factor, form) if name in way else ""


def compare(ratios: Mapping[str, float], limits: Iterable[tuple[str, str, float, str]]) -> list[Report]:
    """Compare ratios with their limits: name, "at least" or "at most", limit, and description of each."""
    found = []
    for name, direction, limit, words in limits:
        if name in ratios:
            met = ratios[name] >= limit if direction == "at least" else ratios[name] <= limit
            found.append({"what": words, "value": ratios[name], direction.replace(" ", "_"): limit, "met": met})
    return found


def targets_table(targets: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of the results of `compare`."""
    table = Table("targets", "value", "limit", "")
    for target in targets:
        limit = f"at least {target['at_least']:g}" if "at_least" in target else f"at most {target['at_most']:g}"
        table.add_row(target["what"], f"{target['value']:.3f}", limit, "met" if target["met"] else "MISSED")
    return table
