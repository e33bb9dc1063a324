"""Draws docs/countdown.png (needs matplotlib): `python docs/countdown.py [REPORT] [PATH]`.

Accuracy on Countdown by tokens and by decode passes, from a report of `python -m benchmarks search`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from figures import RESULTS, draw_report

REPORT = RESULTS / "2026-11-30-cpu-1-thread-search.json"
PICTURE = Path(__file__).with_suffix(".png")
AXES = {"tokens": "generated tokens of a problem", "passes": "forward passes of a problem"}
PANELS = {
    "scores of the model": {
        "vote": "majority vote",
        "best_of log_prob": "best_of, log_prob",
        "search top log_prob": "search top, log_prob",
        "search tournament log_prob": "search tournament, log_prob",
        "search systematic log_prob": "search systematic, log_prob",
        "search systematic confidence": "search systematic, confidence",
        "vote until consensus": "vote until consensus",
    },
    "scores by a check of each line": {
        "best_of check": "best_of, check",
        "search top check": "search top, check",
        "search tournament check": "search tournament, check",
        "search systematic check": "search systematic, check",
        "search top look_ahead": "search top, solver looks ahead",
    },
}
"""Title of each column of panels, and its ways with their labels."""
TICKS = (50, 100, 200, 400)
MARKERS = "os^Dv*P"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a panel per axis and kind of score, a line per way, and a point per width with its 95% interval."""
    from matplotlib.figure import Figure

    results = report["results"]
    greedy = next(found for found in results if found["way"] == "greedy")
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(len(AXES), len(PANELS), sharex="row", sharey=True)
    for (axis, label), row in zip(AXES.items(), panels, strict=True):
        for (title, labels), panel in zip(PANELS.items(), row, strict=True):
            panel.axhline(
                greedy["accuracy"]["mean"], color="black", linewidth=0.8, linestyle="--", label="one greedy answer"
            )
            for shift, ((way, name), marker) in enumerate(zip(labels.items(), MARKERS, strict=False)):
                points = [found for found in results if found["way"] == way]
                means = [found["accuracy"]["mean"] for found in points]
                below = [found["accuracy"]["mean"] - found["accuracy"]["low"] for found in points]
                above = [found["accuracy"]["high"] - found["accuracy"]["mean"] for found in points]
                # Points at the same place are drawn side by side.
                places = [found[axis] * (1 + (0.012 if axis == "tokens" else 0.005) * shift) for found in points]
                panel.errorbar(
                    places,
                    means,
                    yerr=[below, above],
                    label=name,
                    marker=marker,
                    fillstyle="none",
                    capsize=2,
                    linewidth=1,
                )
            panel.set(xlabel=label, ylim=(0, 1))
            if axis == "tokens":
                panel.set_title(title, fontsize=10)
                panel.set_xscale("log")
                panel.set_xticks(TICKS, labels=map(str, TICKS))
                panel.minorticks_off()
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.3)
        row[0].set_ylabel("right answers")
    panels[0][0].legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    panels[1][1].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(draw_report(draw, REPORT, PICTURE))
