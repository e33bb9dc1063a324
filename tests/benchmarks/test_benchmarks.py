"""Benchmarks run in their smallest form and compare the same work; problems for GPUs detect wrong kernels."""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_problems
import pytest
import torch
from gpu_problems import PROBLEMS, TOLERANCE
from pages import ROOT, random_stand_in

import benchmarks.__main__
from benchmarks import engine, measure, papers, parallel_answers
from benchmarks.gpu_parts import layer
from hf_parallel.cli import evaluate

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("shared_prefix", "linear", "levels")
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in benchmarks.__main__.benchmarks()
    if name != "papers"
]
EXPERIMENTS = [(paper, name) for paper, entry in papers.PAPERS.items() for name in entry["experiments"]]


def entries(report: Any) -> Iterator[tuple[str, Any]]:
    """Yield all entries of a report."""
    for name, value in report.items() if isinstance(report, dict) else enumerate(report):
        yield str(name), value
        if isinstance(value, dict | list):
            yield from entries(value)


def program_of(command: str) -> tuple[str, ...]:
    """Return what a command of `papers.json` runs: `evaluate`, an example, or a benchmark, with the stage of a GPU."""
    first, name, *rest = command.split()
    if first != "benchmarks":
        return (first,)
    return (name, rest[rest.index("--only") + 1]) if name == "gpu" else (name,)


class ParsedError(Exception):
    """Raised instead of running a program that has parsed its arguments."""


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_form_measures_everything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl" if name == "training" else "torch")
    random_stand_in(tmp_path / "model")[1].save_pretrained(tmp_path / "model")
    monkeypatch.setattr(measure, "PAGE", 16)
    monkeypatch.setattr(engine, "question", lambda tokenizer, n: [4 + n % 50, 5 + n // 50 % 50])  # a short one
    given = ["--quick", "--output", str(tmp_path / "new" / "report.json")]
    given += [] if name in ("hybrids", "agents_cache", "search") else ["--model", str(tmp_path / "model")]
    if name == "gpu":  # Triton reads a variable when it is imported
        given = ["--toy", "--seed", "0", "--budget-seconds", "3600", "--out", str(tmp_path / "new")]
        subprocess.run([sys.executable, "-m", "benchmarks.gpu", *given], cwd=ROOT, check=True, timeout=3600)
    else:
        monkeypatch.setattr("sys.argv", ["benchmarks", name, *given])
        assert benchmarks.__main__.main() == 0
    (path,) = (tmp_path / "new").iterdir()
    for what, found in entries(json.loads(path.read_text(), parse_constant=pytest.fail)):
        assert found or not what.startswith("same"), f"{what} is {found}"
        assert what not in ("error", "error_of_continuous_batching"), found
        optional = ("flashinfer", "flash-attn", "trl")  # packages
        assert what != "not_measured" or any(name in found for name in optional), found


@pytest.mark.parametrize(("paper", "name"), EXPERIMENTS)
def test_the_commands_of_a_paper_are_known_and_shown(
    paper: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = papers.PAPERS[paper]["experiments"][name]
    needed = {"paper", "paper_takes", "quick", "columns"}
    assert needed | ({"cpu_takes"} if "cpu" in about else {"why_no_cpu"}) <= set(about)
    if "rating" in about["columns"].values():
        assert any("--judge" in text for text in about["paper"])
    if "seconds" in about["columns"].values() and "evaluate" in str(about["paper"]):
        assert all("--concurrent 1" in text for text in about["paper"] if text.startswith("evaluate"))
    assert f"`python -m benchmarks papers {paper} {name}" in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    measured = {form: {program_of(text) for text in about[form]} for form in ("paper", "quick")}
    assert measured["paper"] <= measured["quick"], "the quick form shows the columns of all programs"
    parser, parse = argparse.ArgumentParser(), argparse.ArgumentParser.parse_args
    evaluate.add_options(parser)

    def parse_and_stop(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for form in ("cpu", "paper", "quick"):
        for text in about.get(form, ()):
            first, *rest = papers.command_of(text, paper, Path("runs"), [])[0 if text.startswith("examples") else 1 :]
            if first == "hf_parallel":
                evaluate.read_runs(parse(parser, rest[1:]))
                continue
            monkeypatch.setattr("sys.argv", [first, *rest])
            script = partial(runpy.run_path, str(ROOT / first), {}, "__main__")
            with pytest.raises(ParsedError):
                (benchmarks.__main__.main if first == "benchmarks" else script)()
    monkeypatch.undo()
    assert papers.main([paper, name, "--paper", "--show"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  python ") == len(about["paper"])
    assert f"time: {about['paper_takes']}" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "name"), EXPERIMENTS)
def test_the_smallest_form_of_an_experiment_runs(paper: str, name: str, tmp_path: Path) -> None:
    """And its results have the columns of the paper's table."""
    random_stand_in(tmp_path / "model")[1].save_pretrained(tmp_path / "model")
    quick = papers.PAPERS[paper]["experiments"][name]["quick"]
    given = ["--model", str(tmp_path / "model")] if any("{model}" in text for text in quick) else []
    assert papers.main([paper, name, "--quick", "--output", str(tmp_path / "new" / "found"), *given]) == 0
    written = [path for path in (tmp_path / "new").rglob("*") if path.suffix in (".json", ".jsonl")]
    found: set[str] = set()
    for path in written:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        for line in lines:
            for entry, value in entries(json.loads(line)):
                found |= {entry, f"{entry}={value}"}
    columns = papers.PAPERS[paper]["experiments"][name]["columns"]
    assert {column: key for column, key in columns.items() if key not in found} == {}


def test_an_answer_without_a_block_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's text decides whether there is a block; the benchmark cannot go on without one."""
    model, tokenizer = random_stand_in(tmp_path)
    monkeypatch.setattr(parallel_answers, "generate", lambda *_, **__: SimpleNamespace(fallback=["no marker"]))
    sizes = SimpleNamespace(**parallel_answers.SIZES | parallel_answers.QUICK)
    with pytest.raises(RuntimeError, match="the model generated no block of 2 branches: no marker"):
        parallel_answers.branches_of(model, tokenizer, 2, "rotate", sizes)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_small_error_and_a_read_outside_the_blocks_are_detected(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def check(wrong: Callable[..., torch.Tensor] | None = None) -> float:
        if wrong is not None:
            monkeypatch.setattr(layer, "block_attention", wrong)
        return gpu_problems.check(problem, "float32", torch.device("cpu"), head_dim=16, heads=2, unit=1)

    right = layer.block_attention
    assert check() <= TOLERANCE["float32"]
    assert check(lambda *given: right(*given) + 2e-5) > TOLERANCE["float32"]
    with pytest.raises(FloatingPointError):
        check(lambda *given: right(*given) + 0 * given[1].sum())
