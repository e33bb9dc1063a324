"""Draws the pictures of docs/benchmarks.md from the newest reports in benchmarks/results (needs matplotlib).

`gpu`: step time by rows and attention by prefix. `engine`: latency and rejections by offered rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import RESULTS

MODEL, PREFIX = "Qwen3-8B", 1024
"""Model and prompt of the steps."""
HEADS, ROWS, SUFFIX = [32, 8, 128], 256, 128
"""Size of the attention."""
WAYS = {
    "generate": ("generate", "tab:gray"),
    "static_cache": ("generate, compiled static cache", "black"),
    "unshared": ("a copy of the prompt per row", "tab:orange"),
    "uncompiled": ("shared_prefix, not compiled", "tab:cyan"),
    "shared_prefix": ("shared_prefix", "tab:blue"),
    "no_attention": ("the same without attention", "tab:green"),
    "floor": ("reading weights and KV once", "tab:red"),
}
"""Label and color of each method."""
KERNELS = {
    "flash": ("FlashAttention, a copy per row", "tab:gray"),
    "flashinfer": ("FlashInfer's cascade", "tab:orange"),
    "": ("block attention", "tab:blue"),
    "floor": ("limit of the hardware", "tab:red"),
}

Line = list[tuple[float, float]]
"""Points of a line."""


def newest(has: Callable[[dict[str, Any]], object], folder: Path = RESULTS) -> dict[str, Any]:
    """Return the newest report for which `has` is true. Raise `FileNotFoundError` if there is none."""
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    found = [report for report in reports if has(report)]
    if not found:
        raise FileNotFoundError(f"no report in {folder} has these figures")
    return max(found, key=lambda report: str(report["machine"]["date"]))


def measured(stage: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that says whether a full report of `benchmarks.gpu` measured a stage."""
    return lambda report: (
        report.get("kind") == "full"
        and any("not_measured" not in case for case in report["stages"].get(stage, {}).get("cases", ()))
    )


def steps(cases: Iterable[dict[str, Any]]) -> dict[str, Line]:
    """Return the seconds of a decode step by rows, for each method that was measured, and the floor of a step."""
    cases = [c for c in cases if (c["model"], c["prefix"]) == (MODEL, PREFIX) and "step_seconds" in c]
    lines: dict[str, Line] = {
        way: sorted((case["rows"], case["step_seconds"]) for case in cases if case["way"] == way) for way in WAYS
    }
    lines["floor"] = sorted((case["rows"], case["floor_seconds"]) for case in cases if case["way"] == "shared_prefix")
    return lines


def attention(cases: Iterable[dict[str, Any]]) -> dict[str, Line]:
    """Return the seconds of attention by prefix, for each kernel that was measured, and the limit of the hardware."""
    cases = [c for c in cases if (c["heads"], c["rows"], c["suffix"]) == (HEADS, ROWS, SUFFIX) and "seconds" in c]
    lines: dict[str, Line] = {
        name: sorted((case["prefix"], of["seconds"]) for case in cases if "seconds" in (of := case.get(name, case)))
        for name in KERNELS
    }
    lines["floor"] = sorted((case["prefix"], case["limit_seconds"]) for case in cases)
    return lines


def draw_gpu(pyplot: Any) -> Any:
    """Return the figure of the newest reports of `benchmarks.gpu`."""
    model, kernels = newest(measured("model")), newest(measured("attention"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _logarithmic(left, steps(model["stages"]["model"]["cases"]), WAYS, 1e3)
    left.set(xlabel="rows", ylabel="ms", title=f"Decode step of {MODEL}, prompt of {PREFIX:,} tokens")
    _logarithmic(right, attention(kernels["stages"]["attention"]["cases"]), KERNELS, 1e6)
    title = f"Attention of a layer, {ROWS} rows of {SUFFIX} tokens each, {HEADS[0]}/{HEADS[1]} heads"
    right.set(xlabel="tokens of the shared prefix", ylabel="us", title=title)
    devices = dict.fromkeys(str(report["machine"]["device"]) for report in (model, kernels))
    figure.suptitle(" and ".join(devices), fontsize=10)
    return figure


def draw_engine(pyplot: Any) -> Any:
    """Return the figure of the newest report of `benchmarks.engine_load`; the capacity is marked."""
    load = newest(lambda report: "load" in report and not report.get("quick"))["load"]
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    titles = {"first_token": "Time to first token", "between_tokens": "Time between tokens"}
    for panel, (times, title) in zip(panels, titles.items(), strict=False):
        for name, style in (("p50", "o-"), ("p99", "s--")):
            line = [(entry["rate"], entry[times][name]) for entry in load["rates"] if entry[times]]
            panel.plot(*zip(*line, strict=True), style, color="tab:blue", label=name)
        panel.set(title=title, ylabel="s", yscale="log")
    line = [(entry["rate"], entry["rejected"] / entry["offered"]) for entry in load["rates"]]
    panels[2].plot(*zip(*line, strict=True), "o-", color="tab:orange")
    panels[2].set(title="Rejected requests")
    panels[2].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for panel in panels:
        panel.axvline(load["requests_per_second"], linestyle=":", color="tab:red", label="capacity")
        panel.set(xlabel="requests per second, offered")
        _plain(panel)
    return figure


def _logarithmic(panel: Any, lines: Mapping[str, Line], labels: Mapping[str, tuple[str, str]], factor: float) -> None:
    for name, (label, color) in labels.items():
        if lines[name]:
            at, seconds = zip(*lines[name], strict=True)
            panel.plot(at, [factor * s for s in seconds], ":" if name == "floor" else "o-", color=color, label=label)
    ticks = sorted({x for line in lines.values() for x, _ in line})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ticks, [f"{x:,}" for x in ticks])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter("{x:,g}")
    _plain(panel)


def _plain(panel: Any) -> None:
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=9, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a picture; return the exit status."""
    from matplotlib import pyplot

    pictures = {"gpu": draw_gpu, "engine": draw_engine}
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=pictures)
    parser.add_argument("picture", type=Path, help="output file, such as docs/gpu.png")
    options = parser.parse_args(arguments)
    figure = pictures[options.name](pyplot)
    figure.savefig(options.picture, dpi=120)
    pyplot.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
