"""The example with images runs on the tiny model that it builds, and prints the lines that its last comment lists."""

from __future__ import annotations

import runpy
import sys

import pytest
from pages import ROOT
from test_examples import check_promised_lines


@pytest.mark.slow
def test_captions_and_regions_of_an_image(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    example = ROOT / "examples" / "images.py"
    monkeypatch.setattr(sys, "argv", [example.name, "--tokens", "8"])
    runpy.run_path(str(example), run_name="__main__")
    check_promised_lines(example, capsys.readouterr().out)
