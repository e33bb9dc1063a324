"""Benchmarks run in their smallest form and compare the same work; problems for GPUs detect wrong kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_problems
import pytest
import torch
from gpu_problems import PROBLEMS, TOLERANCE
from pages import ROOT, random_stand_in

import benchmarks.__main__
from benchmarks import continuous_batching, engine, engine_load
from benchmarks.gpu_parts import layer
from benchmarks.gpu_parts.run import FULL
from hf_parallel.kernels import BACKEND_VARIABLE

pytestmark = pytest.mark.filterwarnings("ignore")

SLOW = ("engine_load", "agents_tot", "lm_eval", "parallel_answers", "resample", "state_interval", "training")
NAMES = ("shared_prefix", "engine", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hogwild", "linear")))


def equalities(report: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a report that say whether two ways gave the same."""
    for name, value in report.items() if isinstance(report, dict) else enumerate(report):
        if str(name).startswith("same"):
            yield str(name), value
        elif isinstance(value, dict | list):
            yield from equalities(value)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_smallest_form_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lm_eval":
        pytest.importorskip("lm_eval")
    random_stand_in(tmp_path / "model")[1].save_pretrained(tmp_path / "model")
    monkeypatch.setattr(continuous_batching, "PAGE", 16)
    for module in (engine, engine_load):  # short questions
        monkeypatch.setattr(module, "question", lambda tokenizer, n: [4 + n % 50, 5 + n // 50 % 50])
    path = tmp_path / "new" / "report.json"
    given = [name, "--quick", "--model", str(tmp_path / "model"), "--output", str(path)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *given])
    assert benchmarks.__main__.main() == 0
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert report["quick"]
    for what, found in equalities(report):
        assert found, f"{what} is {found}"


@pytest.mark.slow
def test_the_toy_form_of_the_gpu_benchmark_measures_every_case(tmp_path: Path) -> None:
    options = ["--toy", "--seed", "0", "--budget-seconds", "3600", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(next(tmp_path.iterdir()).read_text(), parse_constant=pytest.fail)
    assert report["stages"].keys() == FULL.keys()
    for stage in report["stages"].values():
        assert stage["cases"]
        assert not [case for case in stage["cases"] if {"error", "not_measured"} & set(case)]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_small_error_and_a_read_outside_the_blocks_are_detected(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def check(wrong: Callable[..., torch.Tensor] | None = None) -> float:
        if wrong is not None:
            ways = {"reference": right}  # the oracle stays
            monkeypatch.setattr(
                layer, "block_attention", lambda *given: ways.get(os.environ.get(BACKEND_VARIABLE, ""), wrong)(*given)
            )
        return gpu_problems.check(problem, "float32", torch.device("cpu"), head_dim=16, heads=2, unit=1)

    right = layer.block_attention
    assert check() <= TOLERANCE["float32"]
    assert check(lambda *given: right(*given) + 2e-5) > TOLERANCE["float32"]
    with pytest.raises(FloatingPointError):
        check(lambda *given: right(*given) + 0 * given[1].sum())
