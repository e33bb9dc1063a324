"""`python -m benchmarks.gpu_figure`: what it plots from the reports of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_figure


def test_lines_are_the_figures_of_the_reports() -> None:
    steps, kernels = gpu_figure.steps(gpu_figure.newest("model")), gpu_figure.attention(gpu_figure.newest("attention"))
    assert {"generate", "shared_prefix", "no_attention", "floor"} <= set(steps)
    for rows, seconds in steps["shared_prefix"]:
        assert dict(steps["floor"])[rows] < seconds
    assert [prefix for prefix, _ in kernels[""]] == [1024, 4096, 16384, 65536]
    for prefix, seconds in kernels[""]:
        assert dict(kernels["floor"])[prefix] < seconds < dict(kernels["flashinfer"])[prefix]


def report(date: str, stage: str, case: dict[str, Any], kind: str = "full") -> str:
    return json.dumps({"kind": kind, "machine": {"date": date}, "stages": {stage: {"cases": [case]}}})


def test_the_newest_full_report_with_figures_is_plotted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(report("2026-01-02", "model", {"seconds": 1}))
    (tmp_path / "b.json").write_text(report("2026-01-01", "model", {"seconds": 2}))
    (tmp_path / "c.json").write_text(report("2026-01-03", "model", {"not_measured": "out of time"}))
    (tmp_path / "d.json").write_text(report("2026-01-04", "model", {"seconds": 3}, kind="quick"))
    (tmp_path / "e.json").write_text(report("2026-01-05", "attention", {"seconds": 4}))
    (tmp_path / "f.json").write_text(json.dumps({"other": "report"}))
    assert gpu_figure.newest("model", tmp_path)["stages"]["model"]["cases"] == [{"seconds": 1}]
    with pytest.raises(FileNotFoundError, match="graphs"):
        gpu_figure.newest("graphs", tmp_path)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    assert gpu_figure.main([str(tmp_path / "gpu.png")]) == 0
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
