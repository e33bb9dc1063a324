"""`python -m benchmarks.gpu`: a toy run without a GPU, detection of wrong kernels, and the report."""

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

from benchmarks.gpu_parts import baselines, correctness, layer, model, models, report, run, ways
from benchmarks.gpu_parts.cases import Case, attempt, run_cases
from benchmarks.gpu_parts.layer import Features, Layer
from benchmarks.gpu_parts.timing import Ceilings, Deadline, OutOfTimeError, Timer
from hf_parallel.cache import Arena
from hf_parallel.kernels import BACKEND_VARIABLE
from hf_parallel.models import attention, compiled

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
CEILINGS = Ceilings(bytes_per_second=4e12, flops_per_second=8e14)


# The whole script


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of `python -m benchmarks.gpu --toy`, and its output."""
    folder = tmp_path_factory.mktemp("benchmarks") / "new"
    options = ["--toy", "--seed", "0", "--budget-seconds", "1800", "--out", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    assert path.name.endswith("-gpu-toy.json")
    return json.loads(path.read_text(), parse_constant=pytest.fail) | {"output": done.stdout}


@pytest.mark.slow
def test_report_describes_machine_and_settings(result: dict[str, Any]) -> None:
    machine = result["machine"]
    assert (machine["torch"], result["kind"], result["seed"]) == (torch.__version__, "toy", 0)
    assert machine["backend"] in ("triton", "torch")
    assert {"date", "cpu", "cores", "device", "python", "transformers", "packages"} <= set(machine)
    assert min(result["ceilings"].values()) > 0


def test_every_case_of_every_stage_is_measured(result: dict[str, Any]) -> None:
    sizes = {
        "correctness": 6,
        "graphs": 4,
        "attention": 2,
        "hogwild": 2,
        "model": 13 + 2 * ways.HAS_COMPILE,
        "prefill": 1,
        "start": 2,
        "sampling": 6,
    }
    for name, stage in result["stages"].items():
        assert len(stage["cases"]) == sizes[name], name
        assert not [case for case in stage["cases"] if "error" in case or "not_measured" in case], name
        assert f"{name}: {sizes[name]} of {sizes[name]} measured" in result["output"]


def test_kernels_equal_the_oracle(result: dict[str, Any]) -> None:
    for case in result["stages"]["correctness"]["cases"]:
        assert case["ok"], case
        comparable = case["problem"] not in ("softcap", "sinks", "append", "move")
        assert ("flash_error" in case) == (comparable and case["dtype"] == "float16")


def test_figures_follow_from_what_was_timed(result: dict[str, Any]) -> None:
    limits = result["ceilings"]
    for case in result["stages"]["attention"]["cases"]:
        assert case["kv_bytes"] == (64 + case["rows"] * 16) * 2 * 16 * 4
        assert case["limit_seconds"] >= case["kv_bytes"] / limits["bytes_per_second"]
        assert case["of_limit"] == pytest.approx(case["limit_seconds"] / case["seconds"])
        assert case["by_flash"] == pytest.approx(case["seconds"] / case["flash"]["seconds"])
        assert max(case["flash"]["difference"], case["rows_checked"]["difference"]) < 1e-5
        assert "flashinfer" in case["flashinfer"]["not_measured"]
    for case in result["stages"]["hogwild"]["cases"]:
        assert case["by_flash"] == pytest.approx(case["seconds"] / case["flash_seconds"])
        assert 0 < case["set_up_seconds"] <= case["set_up_worst_seconds"]
    for case in result["stages"]["model"]["cases"]:
        assert case["tokens_per_second"] == pytest.approx(case["rows"] / case["step_seconds"])
        assert case["steps"] == 3
        assert ("by_floor" in case) == (case["way"] in ("shared_prefix", "uncompiled"))
        if case["way"] != "generate_batch":
            assert 0 < case["first_token_seconds"] < case["call_seconds"]
    (prefill,) = result["stages"]["prefill"]["cases"]
    assert prefill["by_plain"] == pytest.approx(prefill["seconds"] / prefill["plain_seconds"])
    for case in result["stages"]["start"]["cases"]:
        assert case["start_seconds"] == pytest.approx(case["first_seconds"] - case["again_seconds"])


def test_acceptance_lists_every_target_with_its_figure(result: dict[str, Any]) -> None:
    lines = {line["what"]: line for line in result["acceptance"]}
    assert len(lines) == 21
    assert lines["attention: time relative to FlashInfer's cascade"]["status"] == "not measured"
    measured = [line for line in lines.values() if line["status"] != "not measured"]
    for line in measured:
        keeps = line["worst"] >= line["limit"] if line["at_least"] else line["worst"] <= line["limit"]
        assert (line["status"] == "met") == keeps
        assert line["measured"] == line["of"] > 0
        assert line["what"] in result["output"]
    rate = {(c["way"], c["rows"], c["prefix"]): c["tokens_per_second"] for c in result["stages"]["model"]["cases"]}
    lost = 1 - rate["shared_prefix", 2, 16] / rate["shared_prefix", 2, 8]
    assert lines["model, 2 rows: throughput lost from prefix 8 to 16"]["worst"] == pytest.approx(lost)
    scaling = rate["hogwild", 2, 8] / rate["hogwild", 1, 8]
    assert lines["model, hogwild: tokens/s of 2 workers relative to 1"]["worst"] == pytest.approx(scaling)


def test_without_a_gpu_the_script_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.start(["attention"], "full", 1.0, 0, tmp_path) == 2
    assert "no GPU" in capsys.readouterr().out


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


@pytest.mark.parametrize(("count", "tokens"), [(1, 128), (2, 1024), (4, 1024), (8, 65536)])
def test_hogwild_blocks_hold_the_given_number_of_unique_tokens(count: int, tokens: int) -> None:
    made = Layer(Features(1, 1, 2, rotary=layer.rotary_of(2)), CPU)
    segments = layer.hogwild(made, count, tokens)
    seen = {block for segment in segments for block in segment.view}
    assert sum(block.length for block in seen) == tokens
    assert len(segments) == count
    assert made.cache.prepare(segments).plan.rotates


def test_decoding_is_compared_with_and_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(ways, "_timed", lambda *_, **settings: given.append(settings) or {})
    toy = models.Models(CPU, torch.float32).get("toy")
    for has_compile in (False, True):
        for module in (ways, model):
            monkeypatch.setattr(module, "HAS_COMPILE", has_compile)
        for way in ("shared_prefix", "uncompiled", "hogwild"):
            ways.WAYS[way](toy, 2, 8, 4, Deadline(3600))
        cases = list(run.TOY.model.cases(models.Models(CPU, torch.float32), CEILINGS, Deadline(3600)))
        compared = [case.settings["rows"] for case in cases if case.settings["way"] == "uncompiled"]
        assert compared == ([1, 2] if has_compile else [])
    assert [settings.get("compile") for settings in given] == [None] * 3 + [True, False, True]


def test_attention_is_skipped_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    toy, usual = models.Models(CPU, torch.float32).get("toy"), attention.attend_blocks
    with models.attention_skipped() as asked:
        assert attention.attend_blocks is not usual
        ways.shared_prefix(toy, rows=2, prefix=8, steps=6, deadline=Deadline(3600))
    assert set(asked) == {8, 2}, "new tokens of the prefill and of decode steps"
    assert models.draw_prompt(toy, 1, 4096).min() > models.PAD  # `generate` would mask it
    assert attention.attend_blocks is usual


# Every case is reported


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


def test_a_case_that_breaks_the_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later CUDA call fails, including the one that frees memory."""

    def broken(*_: object) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", broken)
    assert "illegal memory access" in attempt(broken)["error"]


@pytest.mark.parametrize("way", ["shared_prefix", "hogwild", "generate", "generate_batch"])
def test_a_way_that_is_too_slow_is_stopped(way: str) -> None:
    toy = models.Models(CPU, torch.float32).get("toy")
    with pytest.raises(OutOfTimeError):
        ways.WAYS[way](toy, 2, 8, 32, Deadline(0))


def test_an_interrupted_run_keeps_its_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "WRITTEN_EVERY", 0)
    started = run.Run(run.TOY, CPU, tmp_path / "new" / "result.json", {})
    killed = Case({}, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    cases = iter([Case({"rows": 1}, lambda: {"seconds": 1.0}), killed])
    monkeypatch.setattr(started, "_cases", lambda name, deadline: cases)
    with pytest.raises(KeyboardInterrupt):
        started.stage("attention", 60)
    kept = json.loads(started.path.read_text())
    assert kept["stages"]["attention"]["cases"] == [{"rows": 1, "seconds": 1.0}]


def ideal(sizes: run.Sizes, figures: dict[str, Any]) -> dict[str, Any]:
    """Return all stages at these sizes, with the same figures in every case."""
    cases = {
        "correctness": sizes.correctness.cases(CPU),
        "graphs": sizes.graphs.cases(models.Models(CPU, torch.float32)),
        "attention": sizes.attention.cases(Timer(CPU), CEILINGS),
        "hogwild": sizes.hogwild.cases(Timer(CPU), CEILINGS),
        "model": sizes.model.cases(models.Models(CPU, torch.float32), CEILINGS, Deadline(3600)),
        "prefill": sizes.prefill.cases(models.Models(CPU, torch.float32), Deadline(3600)),
        "start": sizes.start.cases(CPU, torch.float32, Deadline(3600)),
        "sampling": sizes.sampling.cases(Timer(CPU)),
    }
    stages = {name: {"cases": [case.settings | figures for case in made]} for name, made in cases.items()}
    for case in stages["model"]["cases"]:
        if "not_measured" not in figures:
            case["tokens_per_second"] = 33_000.0 * (case["rows"] if case["way"] == "hogwild" else 1)
            case["tokens_per_second"] *= 0.5 if case["way"] == "static_cache" else 1
    return stages


COUNTED = {
    "hogwild": {"workers": 2},
    "model": {"way": "shared_prefix", "rows": 1, "prefix": 8},
    "start": {"process": "second"},
}
"""Settings of toy cases that count for a target."""
GOOD: dict[str, Any] = dict.fromkeys(
    ("error_by_flash", "of_limit", "by_flash", "by_flashinfer", "by_floor", "by_plain", "start_seconds"), 1.0
)
GOOD |= {
    "ms_over_greedy": 1.0,
    "max_error": 1e-6,
    "set_up_seconds": 4e-5,
    "flash": {"difference": 1e-3},
    "rows_checked": {"difference": 1e-3},
}


def test_full_sizes_cover_all_targets() -> None:
    stages = ideal(run.Sizes(), GOOD)
    large = sum(case["kv_bytes"] >= 256e6 for case in stages["attention"]["cases"])
    counts = [len(stage["cases"]) for stage in stages.values()]
    uncompiled = 6 * ways.HAS_COMPILE
    assert counts == [195, 8, 120, 16, 2 * (4 + 6 + 1 + 8 + 17) + uncompiled + 1 + 3 + 12 + 12, 4, 2, 48]
    lines = run.Sizes().acceptance.table(stages)
    assert {line["status"] for line in lines} == {"met"}, lines
    of = [130, 65, 195, 8, 120, large, large, 120, 120, 2, 16, 2, 2, 4, 8, 1, 1, 1, 4, 1, 48]
    assert [line["of"] for line in lines] == of
    assert {line["status"] for line in run.Sizes().acceptance.table({})} == {"not measured"}


def test_a_target_without_figures_is_neither_met_nor_missed() -> None:
    late = ideal(run.Sizes(), {"not_measured": "out of time"})
    assert {line["status"] for line in run.Sizes().acceptance.table(late)} == {"not measured"}
    mixed = ideal(run.TOY, GOOD)
    del mixed["hogwild"]["cases"][0]["set_up_seconds"]
    line = next(line for line in run.TOY.acceptance.table(mixed) if "set-up" in line["what"])
    assert (line["status"], line["measured"], line["of"]) == ("not measured", 1, 2)


@pytest.mark.parametrize(
    ("stage", "bad"),
    [
        ("correctness", {"max_error": 0.1}),
        ("correctness", {"error": "RuntimeError: no such kernel"}),
        ("correctness", {"error_by_flash": 1.6}),
        ("graphs", {"max_error": 1e-3}),
        ("graphs", {"error": "RuntimeError: no decode step was captured"}),
        ("attention", {"flash": {"difference": 0.3}}),
        ("attention", {"rows_checked": {"difference": 0.3}}),
        ("attention", {"of_limit": 0.8, "bound": "memory"}),
        ("attention", {"of_limit": 0.65, "bound": "compute"}),
        ("attention", {"by_flash": 1.1}),
        ("attention", {"by_flashinfer": 1.1}),
        ("hogwild", {"by_flash": 1.2}),
        ("hogwild", {"set_up_seconds": 6e-5}),
        ("model", {"by_floor": 1.5}),
        ("model", {"way": "no_attention", "rows": 2, "prefix": 16, "tokens_per_second": 40_000.0}),
        ("model", {"way": "static_cache", "tokens_per_second": 30_000.0}),
        ("prefill", {"by_plain": 1.1}),
        ("start", {"start_seconds": 6.0}),
        ("sampling", {"ms_over_greedy": 3.0}),
    ],
)
def test_one_bad_figure_misses_one_target(stage: str, bad: dict[str, Any]) -> None:
    stages = ideal(run.TOY, GOOD)
    assert {line["status"] for line in run.TOY.acceptance.table(stages)} == {"met"}
    wanted = {name: bad.get(name, value) for name, value in COUNTED.get(stage, {}).items()}
    case = next(case for case in stages[stage]["cases"] if wanted.items() <= case.items())
    case |= bad
    missed = [line["what"] for line in run.TOY.acceptance.table(stages) if line["status"] == "missed"]
    assert len(missed) == 1, missed


def test_a_baseline_without_memory_is_no_comparison() -> None:
    stages = ideal(run.TOY, GOOD)
    case = stages["attention"]["cases"][0]
    case["flash"] = {"not_measured": "out of memory"}
    del case["by_flash"]
    (line,) = (
        line
        for line in run.TOY.acceptance.table(stages)
        if line["what"].startswith("attention: time relative to FlashA")
    )
    assert (line["status"], line["measured"], line["of"]) == ("met", 1, 1)


def test_tables_need_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.print_table("title", ["", "us"], [["rows", "1.5"], ["r", "10.25"]])
    assert capsys.readouterr().out.splitlines() == ["title", "         us", "rows    1.5", "r     10.25"]


def test_a_table_shows_whether_decode_steps_were_captured() -> None:
    cell = dict(report.COLUMNS["model"])["graphs, MB"]
    stats = [{"stats": {"graph_bytes": size}} for size in (0, 52_000_000)]
    assert [cell(case) for case in (*stats, {})] == ["0", "52", ""]


def test_a_table_lists_the_cases_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        {"workers": 1, "tokens": 8, "seconds": 1e-6},
        {"workers": 2, "tokens": 8, "not_measured": "out of time"},
        {"workers": 4, "tokens": 8, "not_measured": "out of time"},
        {"workers": 8, "tokens": 8, "error": "RuntimeError: no\nsecond line", "traceback": "..."},
    ]
    report.print_stage("hogwild", {"cases": cases, "seconds": 1.0})
    out = capsys.readouterr().out
    assert "1 of 4 measured" in out
    assert "not measured (out of time): 2 configurations, the first being workers 2, tokens 8" in out
    assert "not measured (RuntimeError: no): 1 configurations, the first being workers 8, tokens 8" in out
