"""Runs a benchmark and reports it: options, set-up, machine, targets, JSON and plain text."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
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

HIDDEN = {"machine", "model", "quick", "settings", "stats", "steps", "targets", "answers", "flops", "limit_seconds"}
HIDDEN |= {"error", "not_measured", "traceback"}
"""Entries that are not printed."""

Report = dict[str, Any]
Limit = tuple[str, str, float, str]
"""Name of a ratio, "at least" or "at most", limit, and description."""


def run_benchmark(module: Any, arguments: Sequence[str]) -> int:
    """Run a benchmark with these options of the command line; write and print the report; return the exit status.

    A benchmark is a module with a function `run(model, tokenizer, sizes)`, which returns entries of the report. `SIZES`
    has the default sizes; numbers and texts are options, and `HELP` may describe them. `QUICK` has tiny sizes,
    `TARGETS` the limits of its `ratios`. `load(options)` replaces `set_up`.
    """
    name, known = module.__name__.rpartition(".")[2], getattr(module, "SIZES", {})
    parser = new_parser(name, module.__doc__)
    words = getattr(module, "HELP", {})
    for option, default in known.items():
        if isinstance(default, int | float | str):
            flag = f"--{option.replace('_', '-')}"
            parser.add_argument(flag, type=type(default), metavar="N", help=words.get(option, f"default: {default}"))
    options = parser.parse_args(arguments)
    given = {option: value for option, value in vars(options).items() if option in known and value is not None}
    sizes = known | (getattr(module, "QUICK", {}) if options.quick else {}) | given
    if options.cpu_time:
        options.threads, time.perf_counter = 1, time.process_time  # all clocks here and in the package call it
    model, tokenizer = getattr(module, "load", set_up)(options)
    where = (torch.device("cpu"), torch.float32) if model is None else (model.device, model.dtype)
    report: Report = {"machine": machine(*where), "model": options.model or "SmolLM2-135M-Instruct"}
    report |= {"quick": options.quick, "settings": sizes}
    if options.cpu_time:
        report["machine"]["clock"] = "CPU time of one thread; other processes used the machine"
    report |= module.run(model, tokenizer, argparse.Namespace(**sizes, quick=options.quick, model=options.model))
    if hasattr(module, "TARGETS"):
        report["targets"] = compare(report["ratios"], module.TARGETS)
    kind = name.replace("_", "-") + "-quick" * options.quick
    finish(report, options.output or RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}-{kind}.json")
    return 0


def new_parser(name: str, words: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=str(words).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    parser.add_argument("--model", metavar="ID_OR_PATH", help="default: the demo model")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    words = "measure CPU time of one thread: for a machine with other work"
    parser.add_argument("--cpu-time", action="store_true", help=words)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
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


def finish(report: Report, path: Path) -> None:
    """Write a report with the current load average, and print it."""
    report["machine"]["load_average_after"] = load_average()
    write(report, path)
    show("report", report)
    for target in report.get("targets", ()):
        show_target(target)
    if report.get("quick"):
        print("(--quick: the figures are meaningless)")
    print(f"Written to {path}")


def write(report: Report, path: Path) -> None:
    """Write a report, finished or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


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


def show(title: str, part: Any) -> None:
    """Print the figures of a part of a report: a line for each part of it that has figures; of several, the median."""
    figures = []
    for name, value in part.items() if isinstance(part, Mapping) else enumerate(part):
        if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
            value = statistics.median(value)
        if name in HIDDEN or value is None:
            continue
        if isinstance(value, Mapping | list):
            show(f"{title}: {name}", value)
        else:
            figures.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    if figures:
        print(f"  {title}: {', '.join(figures)}")


def compare(ratios: Mapping[str, float], limits: Iterable[Limit]) -> list[Report]:
    """Compare ratios with their limits."""
    found = []
    for name, direction, limit, words in limits:
        if name in ratios:
            met = ratios[name] >= limit if direction == "at least" else ratios[name] <= limit
            found.append({"what": words, "value": ratios[name], direction.replace(" ", "_"): limit, "met": met})
    return found


def show_target(target: Mapping[str, Any]) -> None:
    """Print a result of `compare`."""
    limit = f"at least {target['at_least']:g}" if "at_least" in target else f"at most {target['at_most']:g}"
    print(f"  {target['what']}: {target['value']:.3f}, {limit}: {'met' if target['met'] else 'MISSED'}")
