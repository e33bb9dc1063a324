"""Plots of a sweep: their points are the rows of the table."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from hf_parallel.cli import main as cli
from hf_parallel.evaluation.plots import AXES, draw, save_plots
from hf_parallel.evaluation.results import settings_text

ROWS: list[dict[str, Any]] = [
    {
        "task": "sums",
        "mode": mode,
        "settings": settings,
        "budget": budget,
        "passes": budget - 1.5,
        "score": score,
        "error": error,
        "tokens": rows * budget - 0.5,
        "seconds": 0.03 * budget,
    }
    for mode, settings, rows in (("none", {}, 1), ("hogwild", {"num_workers": 2}, 2))
    for budget, score, error in ((64, 0.25 * rows, 0.1), (16, 0.125, None))
]


@pytest.mark.parametrize("name", AXES)
def test_a_line_has_the_rows_of_a_mode_in_order_of_budgets(name: str) -> None:
    (panel,) = draw(ROWS, name).axes
    column, label = AXES[name]
    assert (panel.get_title(), panel.get_xlabel(), panel.get_ylabel()) == ("sums", label, "accuracy")
    assert len(panel.containers) == 2
    for container, (larger, smaller) in zip(panel.containers, (ROWS[:2], ROWS[2:]), strict=True):
        rows = (smaller, larger)
        assert container.get_label() == f"{larger['mode']} {settings_text(larger['settings'])}".rstrip()
        line, _, (errors,) = container
        assert line.get_xydata().tolist() == [[row[column], row["score"]] for row in rows]
        ends = [[y for _, y in segment] for segment in errors.get_segments()]
        for (low, high), row in zip(ends, rows, strict=True):
            error = row["error"] or 0.0
            assert (low, high) == pytest.approx((row["score"] - error, row["score"] + error))


def test_lines_of_several_tasks_have_their_names() -> None:
    rows = [ROWS[0], ROWS[0] | {"task": "letters"}]
    (panel,) = draw(rows, "passes").axes
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["sums none", "letters none"]


def test_independent_rows_have_a_line_for_two_workers_in_turns() -> None:
    rows = [row | {"two_worker_passes": row["passes"] + extra} for row, extra in zip(ROWS, (9, 3, 0, 0), strict=True)]
    (panel,) = draw(rows, "passes").axes
    own, turns, workers = panel.containers
    assert [line.get_label() for line in (own, turns)] == ["none", "none, two workers in turns"]
    assert turns[0].get_xdata().tolist() == [16 - 1.5 + 3, 64 - 1.5 + 9]
    assert turns[0].get_ydata().tolist() == own[0].get_ydata().tolist()
    assert workers.get_label() == "hogwild num_workers=2"
    assert len(draw(rows, "tokens").axes[0].containers) == 2


def test_rows_without_times_have_no_plot_by_seconds(tmp_path: Path) -> None:
    untimed = [{name: value for name, value in row.items() if name != "seconds"} for row in ROWS]
    names = ["accuracy_by_passes.svg", "accuracy_by_tokens.svg"]
    assert [path.name for path in save_plots(untimed, tmp_path, "svg")] == names
    assert [path.name for path in save_plots(ROWS, tmp_path, "svg")] == [*names, "accuracy_by_seconds.svg"]
    assert all(path.read_bytes().startswith(b"<?xml") for path in tmp_path.iterdir())


def test_a_missing_matplotlib_and_another_format_are_named_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="suffix must be one of png, svg, pdf, got 'gif'"):
        save_plots(ROWS, tmp_path, "gif")
    original = builtins.__import__

    def without_matplotlib(name: str, *arguments: Any, **settings: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    monkeypatch.setattr("hf_parallel.cli.evaluate.load", None)
    assert cli.main(["evaluate", "--task", "arithmetic", "-o", str(tmp_path / "out"), "--plot"]) != 0
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
