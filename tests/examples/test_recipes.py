"""The scripts of `examples/` that train models, each with a page of its own, on small models."""

from __future__ import annotations

import importlib
import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import run, stand_in
from test_examples import RECIPES, check_promised_lines
from transformers import LlamaForCausalLM

import hf_parallel


def import_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    (recipe,) = (path for path in RECIPES if path.stem == name)
    monkeypatch.syspath_prepend(recipe.parent)
    return importlib.import_module(name)


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
    module = import_recipe(name, monkeypatch)
    for constant, value in limits.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given, "--steps=2"])
    module.main()
    assert len(json.loads(Path("report.json").read_text())["losses"]) == 2
    assert line in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_recipe_train_calls_trains_a_model_that_spawns_the_threads_that_a_question_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_recipe("train_calls", monkeypatch)
    given = ["--steps=1000", "--problems=40", f"--output={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train_calls.py", *given])
    module.main()
    result = json.loads((tmp_path / "report.json").read_text())["result"]
    assert result["spawned_as_asked"] >= 0.9
    assert result["right"] >= 0.9
    assert result["threads"] > 1
    assert "spawned the threads of their lists" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_recipe_train_sums_lowers_the_loss_and_reports_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("peft", "trl", "datasets"):
        pytest.importorskip(package)
    module = import_recipe("train_sums", monkeypatch)
    monkeypatch.setattr(module, "MAX_PASSES", 24)
    monkeypatch.setattr(sys, "argv", ["train_sums.py", "--quick", "--grpo", "2", "--output", str(tmp_path)])
    module.main()
    report = json.loads((tmp_path / "report.json").read_text())
    losses = report["training"]["losses"]
    assert sum(losses[-3:]) < sum(losses[:3])
    measured = {(result["model"], result["workers"]) for result in report["results"]}
    assert measured > {(model, count) for model in ("untrained", "trained") for count in module.WORKERS}
    assert measured > {("after GRPO", count) for count in module.MEASURED}
    assert report["grpo"]["workers"] == [2, 3]
    nothing_right = pytest.approx(-module.PASS_COST * 24)
    assert report["grpo"]["rewards"] == [nothing_right] * 2
    for folder in ("adapter", "adapter-grpo"):
        assert (tmp_path / folder / "adapter_config.json").exists()
    printed = capsys.readouterr().out
    assert all(f"trained, workers: {count}" in printed for count in module.MEASURED)


def test_the_reward_of_train_sums_counts_first_answers_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    module = import_recipe("train_sums", monkeypatch)
    problem = module.make_problem(random.Random(0))
    right = [f"Bob:{module.write_step(*item)}" for item in zip(module.LABELS, problem, strict=True)]
    a, b = problem[2]
    wrong = f"Alice: c {a}+{b}={a + b + 1}\n"
    for steps, share in (
        (right, 1),
        (right[:3], 3 / 6),
        ([wrong, *right], 5 / 6),
        ([*right, wrong], 1),
        (["Bob:\n"], 0),
    ):
        transcript = "\n\n".join(step.rstrip() for step in steps)
        (found,) = module.reward([transcript], [30], [problem], trainer_state=None)
        assert found == pytest.approx(share - 30 * module.PASS_COST)


def test_the_rank_correlation_of_train_sums_ignores_scale_and_runs_of_one_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("peft")
    module = import_recipe("train_sums", monkeypatch)
    rows = {"repeated": [0.0, 0.0, 0.5, 1.0], "duplicated": [0.0, 0.0, 0.1, 0.9]}
    several = {"model": "trained", "workers": 2, "by_problem": rows}
    alone = {"model": "trained", "workers": 1, "by_problem": {"repeated": [0.0], "duplicated": [1.0]}}
    assert module.rank_correlation([several, alone]) == pytest.approx(1)
    assert module.rank_correlation([alone]) is None


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_scripted_workers_of_train_sums_solve_each_sum_once(
    num_workers: int, embedded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of the training data, read by the code that measures a model."""
    pytest.importorskip("peft")
    module = import_recipe("train_sums", monkeypatch)
    tokenizer = embedded[1]
    problems = [module.make_problem(random.Random(seed)) for seed in range(3)]
    scripts = [module.solve(problem, num_workers, tokenizer) for problem in problems]
    processor = module.Scripted([text for script in scripts for text in script])
    monkeypatch.setattr(module, "generate", partial(module.generate, logits_processor=[processor]))
    result = module.measure(module.make_smallest_model(tokenizer), tokenizer, problems, num_workers)
    assert result["accuracy"] == result["solved"] == 1
    assert result["repeated"] == 0
    assert result["passes"] == pytest.approx(sum(max(map(len, script)) for script in scripts) / len(problems))
    assert result["tokens"] == pytest.approx(sum(sum(map(len, script)) for script in scripts) / len(problems))


def test_examples_of_train_sums_have_the_tokens_of_their_scripts_alone(
    embedded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    module = import_recipe("train_sums", monkeypatch)
    monkeypatch.setattr(module, "RUNS", 2)
    tokenizer = embedded[1]
    drawn = random.Random(0)
    problems = [module.make_problem(drawn) for _ in range(2)]
    examples = module.make_examples(random.Random(0), tokenizer, 2)
    assert sorted(tokenizer.decode(sorted(example.target_ids)) for example in examples) == sorted(
        tokenizer.decode(sorted(token for text in module.solve(problem, 1, tokenizer) for token in text))
        for problem in problems
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_recipe_train_calculator_trains_a_model_that_calls_the_right_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    module = import_recipe("train_calculator", monkeypatch)
    given = ["--warm-up=1000", "--steps=40", "--compare=1", f"--output={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train_calculator.py", *given])
    module.main()
    shared, stock = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert len(shared["rewards"]) == 40
    assert len(stock["rewards"]) == 1
    assert sum(shared["rewards"][-5:]) > sum(shared["rewards"][:5]) + 1
    assert "shared, seed 0: right" in capsys.readouterr().out
