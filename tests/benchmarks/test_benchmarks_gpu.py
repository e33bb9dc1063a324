"""`python -m benchmarks.gpu`: its toy form runs on a CPU, its checks detect wrong kernels, its baselines are fair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT

from benchmarks.gpu_parts import baselines, correctness, graphs, layer, models, run, ways
from benchmarks.gpu_parts.cases import Case, attempt, run_cases
from benchmarks.gpu_parts.layer import Features, Layer
from benchmarks.gpu_parts.timing import Deadline, OutOfTimeError
from hf_parallel.cache import Arena
from hf_parallel.generation.executor import LocalExecutor
from hf_parallel.generation.runner import Runner
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
    assert report["stages"].keys() == run.SHARES.keys()
    for stage in report["stages"].values():
        assert stage["cases"]
        assert not [case for case in stage["cases"] if {"error", "not_measured"} & set(case)]
    assert len(report["acceptance"]) > 20


# Wrong kernels are detected


def checked(problem: str, dtype: str = "float32") -> dict[str, Any]:
    """Run one problem of the correctness stage at toy size."""
    stage = correctness.CorrectnessStage(head_dims=(16,), dtypes=(dtype,), unit=1, problems=(problem,), heads=2)
    (case,) = stage.cases(CPU)
    return attempt(case.run)


def break_attention(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., torch.Tensor]) -> None:
    """Replace every backend but the oracle by `wrong(right, query, keys, values, plan, params)`."""
    right = layer.block_attention

    def attention(*given: Any) -> torch.Tensor:
        if os.environ.get(BACKEND_VARIABLE) == "reference":
            return right(*given)
        return wrong(right, *given)

    monkeypatch.setattr(layer, "block_attention", attention)


@pytest.mark.parametrize("problem", correctness.PROBLEMS)
def test_a_small_error_and_a_read_outside_the_blocks_are_detected(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    assert checked(problem)["ok"]
    break_attention(monkeypatch, lambda right, *given: right(*given) + 2e-5)
    assert not checked(problem)["ok"]
    break_attention(monkeypatch, lambda right, *given: right(*given) + 0 * given[1].sum())
    assert "NaN" in checked(problem)["error"]


@pytest.mark.parametrize(
    ("problem", "lost"),
    [
        ("hogwild", {"rotary": None}),
        ("interleaved", {"rotary": layer.rotary_of(16, part=2)}),
        ("softcap", {"softcap": None}),
        ("sinks", {"sinks": None}),
        ("window", {"window": 36}),
        ("long", {"scale": 0.26}),
    ],
)
def test_a_kernel_that_ignores_an_option_is_detected(
    monkeypatch: pytest.MonkeyPatch, problem: str, lost: dict[str, Any]
) -> None:
    break_attention(monkeypatch, lambda right, *given: right(*given[:-1], replace(given[-1], **lost)))
    figures = checked(problem)
    assert not figures["ok"]
    assert run.wrong({"stages": {"correctness": {"cases": [figures]}}})


def test_an_uninitialized_output_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves_one(right: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        whole = right(*given)
        out = torch.empty_like(whole)
        out[:-1] = whole[:-1]
        return out

    break_attention(monkeypatch, leaves_one)
    assert "NaN" in checked("tree", "bfloat16")["error"]
    assert run.wrong({"stages": {"correctness": {"cases": [checked("tree")]}}})


def test_an_append_to_wrong_slots_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked("append")["ok"]
    write = Arena.write

    def shifted(arena: Arena, layer_idx: int, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None:
        write(arena, layer_idx, key, value.roll(1, dims=1), plan)

    monkeypatch.setattr(Arena, "write", shifted)
    assert not checked("append")["ok"]


def test_a_move_that_does_not_rotate_keys_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked("move", "bfloat16")["ok"]
    copy = Arena.copy
    monkeypatch.setattr(Arena, "copy", lambda arena, *given: copy(arena, *given[:2]))
    assert not checked("move", "bfloat16")["ok"]


@pytest.mark.parametrize("way", ["shared_prefix", "rows end", "hogwild"])
def test_a_replay_with_stale_logits_is_detected(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    cases = {case.settings["way"]: case for case in run.TOY.graphs.cases(models.Models(CPU, torch.float32))}
    right = attempt(cases[way].run)
    assert right["ok"], right
    assert right["compared"] > 0
    usual, before = Runner.run, dict[int, torch.Tensor]()

    def stale(runner: Runner, passes: Any, ids: Any, *given: Any) -> Any:
        logits = usual(runner, passes, ids, *given)
        assert isinstance(runner.executor, LocalExecutor)
        if not runner.executor.cuda_graph or any(segment.num_tokens > 1 for segment in passes[0]):
            return logits
        earlier, before[ids.size] = before.get(ids.size, logits), logits
        return earlier

    monkeypatch.setattr(Runner, "run", stale)
    figures = attempt(cases[way].run)
    assert not figures["ok"]
    assert run.wrong({"stages": {"graphs": {"cases": [figures]}}})


def test_logits_are_compared_while_rows_have_the_same_tokens() -> None:
    expected = [torch.eye(4)[[i, 3]] for i in (0, 1, 2)]  # two rows; the best tokens are 0, 1, 2 and 3, 3, 3
    other = [expected[0], expected[1].roll(1, 1), expected[2] + 0.5]
    assert graphs.largest_difference(expected, expected) == (0.0, 6)
    assert graphs.largest_difference(other[:1] + other[2:], expected[:1] + expected[2:]) == (0.5, 4)
    assert graphs.largest_difference(other, expected) == (1.0, 4)  # both rows have other tokens
    assert graphs.largest_difference(other, expected, ends=[0, 3]) == (0.0, 2)  # and had ended before
    with pytest.raises(RuntimeError, match="2 steps instead of 3"):
        graphs.largest_difference(expected[:2], expected)


# Baselines compute the same problem


@pytest.mark.parametrize("problem", ["tree", "hogwild", "window", "ragged", "prefill", "interleaved"])
def test_dense_views_hold_the_same_problem(problem: str) -> None:
    chosen = correctness.PROBLEMS[problem]
    made = Layer(chosen.features(2, 16, torch.float32), CPU)
    made.step(chosen.layout(made, 1)[0])
    torch.testing.assert_close(correctness._flash(made).double(), made.oracle(), rtol=0, atol=1e-5)


class PagedCascade:
    """Reference implementation of FlashInfer's wrapper, after its documentation."""

    def __init__(self, num_levels: int, workspace: torch.Tensor, layout: str) -> None:
        assert (num_levels, layout) == (2, "NHD")

    def plan(self, queries: Any, pages: Any, indices: Any, last: Any, *sizes: int, sm_scale: float, **_: Any) -> None:
        self.levels = list(zip(queries, pages, indices, last, strict=True))
        self.sizes, self.scale = sizes, sm_scale

    def run(self, query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim, page = self.sizes
        out = []
        for row, q in enumerate(query):
            keys = []
            for queries, pages, indices, last in self.levels:
                of = int(np.searchsorted(queries.numpy(), row, side="right")) - 1
                mine = indices[pages[of] : pages[of + 1]].long()
                length = (len(mine) - 1) * page + int(last[of])
                keys.append(table[mine].transpose(0, 1).reshape(2, -1, kv_heads, dim)[:, :length])
            k, v = torch.cat(keys, dim=1).repeat_interleave(heads // kv_heads, dim=2)
            weights = (torch.einsum("hd,nhd->hn", q, k) * self.scale).softmax(-1)
            out.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(out)


def test_baselines_get_the_same_problem_as_dense_copies_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(MultiLevelCascadeAttentionWrapper=PagedCascade)
    monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
    made = Layer(Features(4, 2, 16, torch.float32), CPU)
    segments = layer.shared_prefix(made, 48, [31, 31, 31])
    made.step(segments)
    root, leaves = segments[0].view[0], [segment.view[-1] for segment in segments]
    keys, values = baselines.dense_copies(made, root, leaves)
    densely = baselines.flash(made.query, keys, values, made.features.scale)
    in_pages = baselines.Cascade(made, root, leaves).attend(made.query)
    for out in (densely, in_pages):
        torch.testing.assert_close(out.double(), made.oracle(), rtol=0, atol=1e-5)


def test_attention_is_skipped_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
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
