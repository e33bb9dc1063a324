"""`python -m benchmarks.gpu`: its toy form runs on a CPU, its baselines are fair. Problems for GPUs detect errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_problems
import pytest
import torch
from gpu_problems import PROBLEMS, TOLERANCE
from paths import ROOT

from benchmarks.gpu_parts import baselines, layer, models, ways
from benchmarks.gpu_parts.cases import Case, run_cases
from benchmarks.gpu_parts.layer import Features, Layer
from benchmarks.gpu_parts.run import FULL
from benchmarks.gpu_parts.timing import Deadline, OutOfTimeError
from hf_parallel.cache import Arena
from hf_parallel.kernels import BACKEND_VARIABLE
from hf_parallel.models import attention, compiled

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_toy_form_measures_every_case(tmp_path: Path) -> None:
    options = ["--toy", "--seed", "0", "--budget-seconds", "3600", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert report["stages"].keys() == FULL.keys()
    for stage in report["stages"].values():
        assert stage["cases"]
        assert not [case for case in stage["cases"] if {"error", "not_measured"} & set(case)]
    assert {target["status"] for target in report["acceptance"]} <= {"met", "missed", "not measured"}


# Problems


def check(problem: str, dtype: str = "float32") -> float:
    """Run one problem at toy size."""
    return gpu_problems.check(problem, dtype, CPU, head_dim=16, heads=2, unit=1)


def break_attention(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., torch.Tensor]) -> None:
    """Replace every backend but the oracle by `wrong(right, query, keys, values, plan, params)`."""
    right = layer.block_attention

    def attention(*given: Any) -> torch.Tensor:
        if os.environ.get(BACKEND_VARIABLE) == "reference":
            return right(*given)
        return wrong(right, *given)

    monkeypatch.setattr(layer, "block_attention", attention)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_small_error_and_a_read_outside_the_blocks_are_detected(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    assert check(problem) <= TOLERANCE["float32"]
    break_attention(monkeypatch, lambda right, *given: right(*given) + 2e-5)
    assert check(problem) > TOLERANCE["float32"]
    break_attention(monkeypatch, lambda right, *given: right(*given) + 0 * given[1].sum())
    with pytest.raises(FloatingPointError):
        check(problem)


@pytest.mark.parametrize(
    ("problem", "lost"),
    [
        ("hogwild", {"rotary": None}),
        ("interleaved", {"rotary": layer.rotary_of(16, part=2)}),
        ("softcap", {"softcap": None}),
        ("sinks", {"sinks": None}),
        ("window", {"window": 36}),
    ],
)
def test_a_kernel_that_ignores_an_option_is_detected(
    monkeypatch: pytest.MonkeyPatch, problem: str, lost: dict[str, Any]
) -> None:
    break_attention(monkeypatch, lambda right, *given: right(*given[:-1], replace(given[-1], **lost)))
    assert check(problem) > TOLERANCE["float32"]


def test_wrong_appends_and_moves_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("append") == 0
    assert check("move", "bfloat16") <= TOLERANCE["bfloat16"]
    write, copy = Arena.write, Arena.copy
    monkeypatch.setattr(
        Arena, "write", lambda arena, index, key, value, plan: write(arena, index, key, value.roll(1, 1), plan)
    )
    monkeypatch.setattr(Arena, "copy", lambda arena, *given: copy(arena, *given[:2]))
    assert check("append") > TOLERANCE["float32"]
    assert check("move", "bfloat16") > TOLERANCE["bfloat16"]


# The benchmark


def test_flash_attention_gets_the_same_problem_as_dense_copies() -> None:
    made = Layer(Features(4, 2, 16, torch.float32), CPU)
    segments = layer.shared_prefix(made, 48, [31, 31, 31])
    made.step(segments)
    leaves = [segment.view[-1] for segment in segments]
    keys, values = baselines.dense_copies(made, segments[0].view[0], leaves)
    densely = baselines.flash(made.query, keys, values, made.features.scale)
    torch.testing.assert_close(densely.double(), gpu_problems.oracle(made), rtol=0, atol=1e-5)


def test_attention_is_skipped_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    toy, usual = models.Models(CPU, torch.float32).get("toy"), attention.attend_blocks
    with models.attention_skipped() as asked:
        assert attention.attend_blocks is not usual
        ways.shared_prefix(toy, rows=2, prefix=8, steps=6, deadline=Deadline(3600))
    assert set(asked) == {8, 2}, "new tokens of the prefill and of decode steps"
    assert models.draw_prompt(toy, 1, 4096).min() > models.PAD  # `generate` would mask it
    assert attention.attend_blocks is usual


def test_failed_and_late_cases_are_reported_and_stop_no_others() -> None:
    def fail(error: Exception) -> dict[str, Any]:
        raise error

    errors = [ValueError("no"), torch.OutOfMemoryError(), OutOfTimeError()]
    cases = [*(Case({}, partial(fail, error)) for error in errors), Case({"rows": 3}, lambda: {"seconds": 1.0})]
    found: list[dict[str, Any]] = []
    run_cases(cases, Deadline(3600), found.append)
    run_cases(cases[3:], Deadline(0), found.append)
    assert found[0]["error"] == "ValueError: no"
    assert "in fail" in found[0]["traceback"]
    assert [case["not_measured"] for case in found[1:3]] == ["out of memory", "out of time"]
    assert found[3:] == [{"rows": 3, "seconds": 1.0}, {"rows": 3, "not_measured": "out of time"}]
