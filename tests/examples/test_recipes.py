"""The scripts of `examples/` that train models, each with a page of its own, on small models."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pages import ROOT, run, stand_in
from test_examples import RECIPES, check_promised_lines
from transformers import LlamaForCausalLM

import hf_parallel


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_a_page(recipe: Path) -> None:
    source = recipe.read_text()
    assert f"Run: python examples/{recipe.name}" in str(ast.get_docstring(ast.parse(source)))
    assert any(f"python examples/{recipe.name}" in page.read_text() for page in (ROOT / "docs").glob("*.md"))


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


def test_the_report_of_train_pdos_meets_its_claims() -> None:
    """The model opens well-formed blocks by itself, and the mode needs fewer passes than tokens."""
    (path,) = (ROOT / "benchmarks" / "results").glob("*-train-pdos.json")
    report = json.loads(path.read_text())
    assert report["share_before"] == 0
    assert report["share_after"] >= 0.8
    assert report["losses"][-1] < 0.2 * report["losses"][0]
    assert report["passes"] < report["answer_tokens"]


# examples/train_workers.py


@pytest.fixture(scope="module")
def train_workers() -> ModuleType:
    return load_recipe("train_workers")


def load_recipe(name: str) -> ModuleType:
    """Import a script of examples/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_second_run_of_train_workers_gives_the_same_figures(
    train_workers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_workers, "BATCH", 2)
    monkeypatch.setattr(train_workers, "MAX_PASSES", 8)
    reports = []
    for name in ("first.json", "second.json"):
        arguments = ["--steps=2", "--layouts=1", "--problems=1", f"--output={name}"]
        monkeypatch.setattr(sys, "argv", ["train_workers.py", *arguments])
        train_workers.main()
        reports.append(json.loads(Path(name).read_text()))
        assert len(reports[-1]["losses"]) == 2
    assert "4 independent" in capsys.readouterr().out
    assert reports[0]["losses"] == reports[1]["losses"]
    assert reports[0]["results"] == reports[1]["results"]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_workers_of_train_workers_learn_to_write_every_list_once(
    train_workers: ModuleType, num_workers: int
) -> None:
    rng, labels = random.Random(0), train_workers.LABELS
    for _ in range(20):
        problem = train_workers.make_problem(rng)
        texts = train_workers.solve(problem, num_workers)
        steps = [part.split() for text in texts for part in " ".join(text).removesuffix("</s>").split(".\n")]
        written = sorted(step for step in steps if len(step) > 1)
        assert written == [[label, *numbers[::-1]] for label, numbers in zip(labels, problem, strict=True)]
        least = (sum(map(len, problem)) + 2 * len(problem)) / num_workers
        assert max(map(len, texts)) <= 1 + least + 3 * (max(map(len, problem)) + 2)


def test_the_report_of_train_workers_meets_its_claims() -> None:
    """Two workers need at most 0.6 of the passes of one; workers that see each other repeat little."""
    (path,) = (ROOT / "benchmarks" / "results").glob("*-train-workers.json")
    report = json.loads(path.read_text())
    of = {(result["workers"], result["shared"]): result for result in report["results"]}
    assert report["losses"][-1] < 0.1 * report["losses"][0]
    assert of[2, True]["passes"] <= 0.6 * of[1, True]["passes"]
    one, two, four = (of[workers, True]["accuracy_by_pass"][4] for workers in (1, 2, 4))  # after 16 passes
    assert one < two < four
    for workers in (2, 4):
        assert of[workers, True]["duplicated_tokens"] < 0.2 * of[workers, False]["duplicated_tokens"]
