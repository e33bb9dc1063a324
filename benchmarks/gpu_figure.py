"""Plots step time by rows and attention by prefix from reports of `python -m benchmarks.gpu`.

`python -m benchmarks.gpu_figure docs/gpu.png` reads, of each stage, the newest report in `benchmarks/results/` that
measured it. Needs matplotlib (extra `eval`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MODEL, PREFIX = "Qwen3-8B", 1024
"""Model and prompt of the steps."""
HEADS, ROWS, SUFFIX = [32, 8, 128], 256, 128
"""Size of the attention."""
WAYS = {
    "generate": "generate",
    "static_cache": "generate, compiled static cache",
    "unshared": "a copy of the prompt per row",
    "uncompiled": "shared_prefix, not compiled",
    "shared_prefix": "shared_prefix",
    "no_attention": "the same without attention",
}
"""Labels of the methods."""
KERNELS = {"flash": "FlashAttention, a copy per row", "flashinfer": "FlashInfer's cascade", "": "block attention"}
COLORS = {
    "generate": "tab:gray",
    "static_cache": "black",
    "unshared": "tab:orange",
    "uncompiled": "tab:cyan",
    "shared_prefix": "tab:blue",
    "no_attention": "tab:green",
    "flash": "tab:gray",
    "flashinfer": "tab:orange",
    "": "tab:blue",
}

Line = list[tuple[int, float]]
"""Points of a line: rows or prefix, and seconds."""


def newest(stage: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the newest full report that measured a stage.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    reports = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    measured = [
        report
        for report in reports
        if report.get("kind") == "full"
        and any("not_measured" not in case for case in report["stages"].get(stage, {}).get("cases", []))
    ]
    if not measured:
        raise FileNotFoundError(f"no full report in {folder} measured the stage {stage!r}")
    return max(measured, key=lambda report: str(report["machine"]["date"]))


def steps(report: dict[str, Any]) -> dict[str, Line]:
    """Return the seconds of a decode step by rows, for each method that was measured, and the floor of a step."""
    cases = [
        case
        for case in report["stages"]["model"]["cases"]
        if (case["model"], case["prefix"]) == (MODEL, PREFIX) and "step_seconds" in case
    ]
    lines = {way: sorted((case["rows"], case["step_seconds"]) for case in cases if case["way"] == way) for way in WAYS}
    lines["floor"] = sorted((case["rows"], case["floor_seconds"]) for case in cases if case["way"] == "shared_prefix")
    return {name: line for name, line in lines.items() if line}


def attention(report: dict[str, Any]) -> dict[str, Line]:
    """Return the seconds of attention by prefix, for each kernel that was measured, and the limit of the hardware."""
    cases = [
        case
        for case in report["stages"]["attention"]["cases"]
        if (case["heads"], case["rows"], case["suffix"]) == (HEADS, ROWS, SUFFIX) and "seconds" in case
    ]
    lines: dict[str, Line] = {
        name: sorted((case["prefix"], of["seconds"]) for case in cases if "seconds" in (of := case.get(name, case)))
        for name in KERNELS
    }
    lines["floor"] = sorted((case["prefix"], case["limit_seconds"]) for case in cases)
    return {name: line for name, line in lines.items() if line}


def draw(path: Path, by_rows: dict[str, Line], by_prefix: dict[str, Line], device: str) -> None:
    """Plot both panels."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _panel(left, by_rows, WAYS, 1e3, "reading weights and KV once")
    left.set(xlabel="rows", ylabel="ms", title=f"Decode step of {MODEL}, prompt of {PREFIX:,} tokens")
    _panel(right, by_prefix, KERNELS, 1e6, "limit of the hardware")
    title = f"Attention of a layer, {ROWS} rows of {SUFFIX} tokens each, {HEADS[0]}/{HEADS[1]} heads"
    right.set(xlabel="tokens of the shared prefix", ylabel="us", title=title)
    figure.suptitle(device, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(panel: Any, lines: dict[str, Line], labels: dict[str, str], factor: float, floor: str) -> None:
    for name, label in {**labels, "floor": floor}.items():
        if name in lines:
            at, seconds = zip(*lines[name], strict=True)
            style = (
                {"linestyle": ":", "color": "tab:red"} if name == "floor" else {"marker": "o", "color": COLORS[name]}
            )
            panel.plot(at, [factor * value for value in seconds], label=label, **style)
    ticks = sorted({x for line in lines.values() for x, _ in line})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ticks, [f"{x:,}" for x in ticks])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter("{x:,g}")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=9, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot the newest reports; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_figure", description=str(__doc__).splitlines()[0])
    parser.add_argument("picture", type=Path, help="output file, such as docs/gpu.png")
    options = parser.parse_args(arguments)
    model, kernels = newest("model"), newest("attention")
    device = " and ".join(dict.fromkeys(str(report["machine"]["device"]) for report in (model, kernels)))
    draw(options.picture, steps(model), attention(kernels), device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
