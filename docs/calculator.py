"""Draws docs/calculator.png (needs matplotlib): `python docs/calculator.py [REPORT] [PATH]`.

Rewards of GRPO with a calculator by step, from a report of `examples/train_calculator.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from figures import RESULTS, draw_report

REPORT = RESULTS / "2026-11-30-cpu-1-thread-train-calculator.json"
PICTURE = Path(__file__).with_suffix(".png")
LABELS = {"shared": "SharedPrefixGRPOTrainer", "trl": "GRPOTrainer of TRL"}
COLORS = {"shared": "tab:blue", "trl": "tab:orange"}
WINDOW = 5
"""Steps of which a point is the mean."""


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a line per run: the mean reward of the last steps, by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    panel = figure.subplots()
    named: set[str] = set()
    for run in report["runs"]:
        way = run["way"]
        rewards = run["rewards"]
        ends = range(WINDOW, len(rewards) + 1)
        means = [sum(rewards[end - WINDOW : end]) / WINDOW for end in ends]
        panel.plot(ends, means, color=COLORS[way], linewidth=1, label=None if way in named else LABELS[way])
        named.add(way)
    panel.set(xlabel="step of GRPO", ylabel=f"right answers, mean of {WINDOW} steps", ylim=(0, 1))
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(draw_report(draw, REPORT, PICTURE))
