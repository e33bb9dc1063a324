"""The examples: each runs on the embedded model and prints the lines that its last comment lists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import (
    EXAMPLES,
    FALSE_WARNINGS,
    NEW_TOKENS,
    NOTEBOOKS,
    OWN_MODES,
    READ_TOKENS,
    ROOT,
    garbled,
    run,
    small_scale,
    stand_in,
)

AGENTS = sorted((ROOT / "examples").glob("agents_*.py"))
"""See test_agent_examples.py."""
RECIPES = sorted({*(ROOT / "examples").glob("*.py")} - {*EXAMPLES, *AGENTS})
"""Scripts that train, see test_recipes.py and test_grpo.py, and two others."""


QUICK = ("shared_prefix",)


@pytest.mark.filterwarnings(*FALSE_WARNINGS)
@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem not in QUICK)) for path in EXAMPLES],
)
def test_example_runs(example: Path, embedded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    repeats = example.stem == "resample"  # samples of one state may be equal
    with small_scale(embedded, NEW_TOKENS if repeats else READ_TOKENS):
        run([example.read_text()], example.name)
    printed = capsys.readouterr().out
    assert repeats or not garbled(printed)
    check_promised_lines(example, printed)


def check_promised_lines(example: Path, printed: str) -> None:
    for line in promised_lines(example):
        pattern = re.escape(line).replace(r"\.\.\.", ".*").replace(r"\ \ ", r"\s+")
        assert re.search(rf"(?m)^\s*{pattern}$", printed), line


def promised_lines(example: Path) -> list[str]:
    """Return the lines of the comment `# Prints:`, in which `...` stands for any text."""
    lines = example.read_text().split("\n# Prints:\n")[1].splitlines()
    assert lines
    return [line.removeprefix("#").strip() for line in lines]


def test_there_is_an_example_for_every_mode_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {example.stem for example in EXAMPLES} == {mode for mode in OWN_MODES if f"`{mode}`" in readme}


@pytest.mark.filterwarnings(*FALSE_WARNINGS)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(
    notebook: Path,
    embedded: tuple[Any, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the notebook writes a page
    display = ModuleType("IPython.display")
    monkeypatch.setattr(display, "HTML", str, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with small_scale(stand_in(embedded)):
        run(["".join(cell["source"]) for cell in cells(notebook, "code")], notebook.name)
    shown = capsys.readouterr().out
    assert "the same as generate: True" in shown
    assert re.search(r"(?m)^[1-9]\d* of \d+ tokens needed no forward pass$", shown)


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    """Return the cells of one kind."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
def test_example_with_ray_runs(embedded: tuple[Any, Any]) -> None:
    pytest.importorskip("ray.serve")
    (example,) = (path for path in RECIPES if path.stem == "ray_replicas")
    check_promised_lines(example, subprocess.check_output([sys.executable, example], text=True))
