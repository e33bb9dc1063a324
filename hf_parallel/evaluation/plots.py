"""Plots of a sweep: accuracy by forward passes, tokens and seconds, with standard errors (extra `eval`).

Most figures of Hogwild! Inference have the first axis (3 to 6, 10, 11 to 19); figure 8 (right) has seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.evaluation.packages import check_matplotlib
from hf_parallel.evaluation.results import Result, settings_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {
    "passes": ("budget", "budget of forward passes"),
    "tokens": ("tokens", "generated tokens of all rows"),
    "seconds": ("seconds", "seconds"),
}
"""Column of the x-axis and its label, by the name of the plot."""
IN_TURNS = "two_worker_passes"
"""Column of a second line of modes with several independent rows (Skeleton-of-Thought with two workers, figure 3)."""
FORMATS = ("png", "svg", "pdf")
MARKERS = "os^Dv*"


def save_plots(rows: Sequence[Result], folder: str | Path, suffix: str = "png") -> list[Path]:
    """Draw accuracy by passes, tokens and seconds into `accuracy_by_{passes,tokens,seconds}.{suffix}` of a folder.

    Parameters
    ----------
    rows : sequence of dict
        Rows of `table`.
    folder : str or Path
        An existing folder.
    suffix : str
        `png`, `svg` or `pdf`.

    Returns
    -------
    list of Path
        The files. There is none by seconds if no row has them.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        For another suffix.
    """
    if suffix not in FORMATS:
        raise ValueError(f"suffix must be one of {', '.join(FORMATS)}, got {suffix!r}")
    check_matplotlib()
    paths = []
    for name, (column, _) in AXES.items():
        if any(column in row for row in rows):
            path = Path(folder) / f"accuracy_by_{name}.{suffix}"
            draw(rows, name).savefig(path, dpi=120)
            paths.append(path)
    return paths


def draw(rows: Sequence[Result], name: str) -> Figure:
    """Return the figure of accuracy by an axis of `AXES`: a line per task, mode and settings, a point per budget.

    By passes, modes with more than two independent rows have another line, for two workers that take turns at them.
    """
    from matplotlib.figure import Figure  # no pyplot, which keeps figures and picks a backend

    column, label = AXES[name]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines: dict[tuple[str, str], list[Result]] = {}  # by label and column of the x-axis
    for row in rows:
        line = _name(row, with_task=len(tasks) > 1)
        if column in row:
            lines.setdefault((line, column), []).append(row)
        if name == "passes" and row.get(IN_TURNS, row["passes"]) != row["passes"]:
            lines.setdefault((f"{line}, two workers in turns", IN_TURNS), []).append(row)
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.add_subplot(xlabel=label, ylabel="accuracy", title=", ".join(tasks))
    for ((line, x), points), marker in zip(lines.items(), cycle(MARKERS), strict=False):
        points = sorted(points, key=lambda row: row["budget"])
        panel.errorbar(
            x=[row[x] for row in points],
            y=[row["score"] for row in points],
            yerr=[row["error"] or 0.0 for row in points],
            label=line,
            marker=marker,
            fillstyle="none",  # so that markers at the same place are all seen
            markersize=8,
            capsize=3,
        )
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=-0.03 * panel.get_ylim()[1])  # markers at 0 are drawn whole
    panel.grid(alpha=0.3)
    panel.legend(fontsize=9, frameon=False)
    return figure


def _name(row: Result, *, with_task: bool) -> str:
    """Return the label of a row's line."""
    words = [row["task"]] if with_task else []
    return " ".join([*words, row["mode"], settings_text(row["settings"])]).rstrip()
