"""The scripts of `examples/` that train models, each with a page of its own, on small models."""

from __future__ import annotations

import importlib.util
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
def test_recipe_train_workers_trains_and_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = (path for path in RECIPES if path.stem == "train_workers")
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(module, "MAX_PASSES", 8)
    monkeypatch.setattr(sys, "argv", [recipe.name, "--steps=2", "--layouts=1", "--problems=1", "--output=report.json"])
    module.main()
    assert len(json.loads(Path("report.json").read_text())["losses"]) == 2
    assert "4 independent" in capsys.readouterr().out
