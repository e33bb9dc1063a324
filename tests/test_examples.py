"""The examples: each runs on the embedded model and shows what it promises."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages import OWN_MODES, ROOT, run, small_scale

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHOWN = {
    "hogwild": r"(?m)^pass +(\d+|-)  (Alice|Bob): ",
    "pdos": r"3 parts were written at the same time: \['Mars', 'Venus', 'Jupiter'\]",
    "resample": r"(?m)^ *[1-9]\d* of \d+ tokens replayed: ",
    "self_consistency": r"votes: \{.*\}, answer: ",
    "shared_prefix": r"(?m)^7: .*\n\n\d+ tokens of prompt computed for 8 completions\.$",
    "skeleton_of_thought": r"\d+ tokens in \d+ forward passes\.",
}
"""What each example prints."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, embedded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with small_scale(embedded):
        run([example.read_text()], example.name)
    assert re.search(SHOWN[example.stem], capsys.readouterr().out)


def test_there_is_an_example_for_every_mode() -> None:
    assert {example.stem for example in EXAMPLES} == set(OWN_MODES) == set(SHOWN)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_is(example: Path) -> None:
    source = example.read_text()
    assert len(source.splitlines()) < 40
    assert f"Run: python examples/{example.name}" in str(ast.get_docstring(ast.parse(source)))
    assert "\nMODEL = None  # " in source


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(
    notebook: Path,
    embedded: tuple[Any, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # it writes a page
    with small_scale(embedded):
        run(["".join(cell["source"]) for cell in cells(notebook, "code")], notebook.name)
    shown = capsys.readouterr().out
    assert "the same as generate: True" in shown
    assert re.search(r"(?m)^[1-9]\d* of \d+ tokens needed no forward pass$", shown)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_one_of_format_4(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    both = [*cells(notebook, "code"), *cells(notebook, "markdown")]
    assert len(both) == len(content["cells"]) == len({cell["id"] for cell in both})
    assert all(re.fullmatch(r"[\w-]{1,64}", cell["id"]) and cell["metadata"] == {} for cell in both)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook, "code"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    """The cells of one kind."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]
