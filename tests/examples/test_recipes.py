"""The scripts of `examples/` that train models, each with a page of its own, on small models."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import run, stand_in
from test_examples import RECIPES, check_promised_lines
from transformers import LlamaForCausalLM

import hf_parallel


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_recipe_train_pdos_trains_and_exports(
    embedded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    stand_in(embedded)[0].save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    monkeypatch.setattr(hf_parallel, "load_embedded_model", lambda: (model, embedded[1]))
    (recipe,) = (path for path in RECIPES if path.stem == "train_pdos")
    monkeypatch.setattr(sys, "argv", [recipe.name, "--steps", "4", "--prompts", "1", "--output", str(tmp_path)])
    run([recipe.read_text()], recipe.name)
    check_promised_lines(recipe, capsys.readouterr().out)
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["losses"]) == report["examples"] / 2 == 4
    assert hf_parallel.hub.load(tmp_path / "adapter").generation_config.generation_mode == "pdos"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limits", "given", "line"),
    [
        (
            "train_workers",
            {"BATCH": 2, "MAX_PASSES": 8},
            ["--layouts=1", "--problems=1", "--output=report.json"],
            "4 independent",
        ),
        (
            "train_fork_join",
            {"MAX_NEW_TOKENS": 8},
            ["lists", "--problems=2", "--timed=1", "--output=."],
            "forked: ",
        ),
    ],
)
def test_recipe_from_scratch_trains_and_measures(
    name: str,
    limits: dict[str, int],
    given: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (recipe,) = (path for path in RECIPES if path.stem == name)
    monkeypatch.syspath_prepend(recipe.parent)
    module = importlib.import_module(name)
    for constant, value in limits.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [recipe.name, *given, "--steps=2"])
    module.main()
    assert len(json.loads(Path("report.json").read_text())["losses"]) == 2
    assert line in capsys.readouterr().out
