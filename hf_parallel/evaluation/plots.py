"""Plots of a sweep: accuracy against forward passes, tokens and seconds, and duplicated work (extra `eval`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from hf_parallel.evaluation.results import Result, settings_text

BUDGET = "budget of forward passes"
PLOTS = {
    "accuracy_by_passes": ("budget", "score", BUDGET, "accuracy"),
    "accuracy_by_tokens": ("tokens", "score", "generated tokens of all rows", "accuracy"),
    "accuracy_by_seconds": ("seconds", "score", "seconds", "accuracy"),
    "duplicated_work": ("budget", "duplicated", BUDGET, "fraction of phrases that another row had written"),
}
"""Plots by file name: columns of the x and y axes, and their labels."""
FORMATS = ("png", "svg")


def save_plots(rows: Sequence[Result], folder: str | Path, suffix: str = "png") -> list[Path]:
    """Plot the rows of `table`, with standard errors, into a folder. Return the paths of the files.

    Raises `ImportError` if matplotlib is not installed, and `ValueError` for a suffix other than `png` or `svg`.
    """
    if suffix not in FORMATS:
        raise ValueError(f"suffix must be one of {', '.join(FORMATS)}, got {suffix!r}")
    check_matplotlib()
    return [_save(rows, Path(folder) / f"{name}.{suffix}", *axes) for name, axes in PLOTS.items()]


def check_matplotlib() -> None:
    """Raise `ImportError` if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'hf_parallel[eval]'") from error


def _save(rows: Sequence[Result], path: Path, x: str, y: str, x_label: str, y_label: str) -> Path:
    from matplotlib.figure import Figure  # no pyplot, which keeps figures and picks a backend

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines: dict[str, list[Result]] = {}
    for row in rows:
        label = f"{row['task']} " * (len(tasks) > 1) + f"{row['mode']} {settings_text(row['settings'])}".strip()
        lines.setdefault(label, []).append(row)
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.add_subplot(xlabel=x_label, ylabel=y_label, title=", ".join(tasks))
    for (label, points), marker in zip(lines.items(), cycle("os^Dv*"), strict=False):
        points = sorted(points, key=lambda row: row["budget"])
        errors = [row["error"] or 0.0 for row in points] if y == "score" else None
        style = {"marker": marker, "fillstyle": "none", "markersize": 8, "capsize": 3}  # seen where lines coincide
        panel.errorbar([row[x] for row in points], [row[y] for row in points], errors, label=label, **style)
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=-0.03 * panel.get_ylim()[1])  # markers at 0 are drawn whole
    panel.grid(alpha=0.3)
    if lines:
        panel.legend(fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    return path
