"""Plots latency by offered rate from a report of `python -m benchmarks.engine --load`.

`python -m benchmarks.engine_figure REPORT docs/engine.png`. Needs matplotlib (extra `eval`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PERCENTILES = {"p50": ("o", "-"), "p99": ("s", "--")}
"""Marker and line of each percentile."""

Line = list[tuple[float, float]]
"""Points of a line: requests per second, and the value."""


def latencies(report: dict[str, Any], times: str) -> dict[str, Line]:
    """Return the percentiles of `first_token` or `between_tokens` in seconds, by offered rate."""
    rates = [entry for entry in report["load"]["rates"] if entry[times]]
    return {name: [(entry["rate"], entry[times][name]) for entry in rates] for name in PERCENTILES}


def rejected(report: dict[str, Any]) -> Line:
    """Return the fraction of the requests that were rejected, by offered rate."""
    return [(entry["rate"], entry["rejected"] / entry["offered"]) for entry in report["load"]["rates"]]


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot time to first token, time between tokens, and rejections; the capacity is marked."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    titles = {"first_token": "Time to first token", "between_tokens": "Time between tokens"}
    for panel, (times, title) in zip(panels, titles.items(), strict=False):
        for name, line in latencies(report, times).items():
            marker, style = PERCENTILES[name]
            panel.plot(*zip(*line, strict=True), marker=marker, linestyle=style, color="tab:blue", label=name)
        panel.set(title=title, ylabel="s", yscale="log")
    panels[2].plot(*zip(*rejected(report), strict=True), marker="o", color="tab:orange")
    panels[2].set(title="Rejected requests (status 429)")
    panels[2].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for panel in panels:
        panel.axvline(report["load"]["requests_per_second"], linestyle=":", color="tab:red", label="capacity")
        panel.set(xlabel="requests per second, offered")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot a report; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_figure", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("report", type=Path, help="of `python -m benchmarks.engine --load`")
    parser.add_argument("picture", type=Path, help="output file, such as docs/engine.png")
    options = parser.parse_args(arguments)
    draw(json.loads(options.report.read_text()), options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
