"""Benchmarks run in their smallest form, and compare the same work."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch

import benchmarks.__main__
import hf_parallel
from benchmarks import continuous_batching, figures
from benchmarks.report import Table
from benchmarks.rounds import Times, prefill_ratio, step_ratio

pytestmark = pytest.mark.filterwarnings("ignore")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a benchmark with options in its smallest form, on a tiny model; return its report."""
    tiny.build("llama").save_pretrained(tmp_path / "model")
    small_tokenizers.make("split_marker").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(continuous_batching, "PAGE", 16)

    def run(name: str, *options: str) -> dict[str, Any]:
        path = tmp_path / "new" / "report.json"
        given = [name, "--quick", "--model", str(tmp_path / "model"), "--output", str(path), *options]
        monkeypatch.setattr("sys.argv", ["benchmarks", *given])
        assert benchmarks.__main__.main() == 0
        assert f"Written to {path}" in capsys.readouterr().out
        return json.loads(path.read_text(), parse_constant=pytest.fail)

    return run


def test_every_method_has_the_tokens_of_generate_and_shared_prefixes_are_stored_once(run: Run) -> None:
    report = run("shared_prefix")
    assert report["same_tokens_as"] == "generate"
    for name in ("shared_prefix", "prefilled_cache", "generate_batch"):
        assert report[name].get("same_tokens", "error" in report[name])
    assert report["shared_prefix"]["stats"]["prefilled_tokens"] == 48
    assert report["ratios"]["kv_bytes_by_unique_tokens"] == 1
    assert report["shared_prefix"]["kv_bytes"] / report["generate"]["kv_bytes"] == (48 + 3 * 3) / (3 * (48 + 3))
    for target in report["targets"]:
        assert target["met"] == (target["value"] <= target["at_most"])


def test_a_hybrid_has_the_tokens_of_generate_and_one_state_per_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "hybrids", "--quick", "--output", str(tmp_path / "report.json")])
    assert benchmarks.__main__.main() == 0
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["shared_prefix"]["same_tokens"]
    assert report["ratios"]["kv_bytes_by_unique_tokens"] == report["ratios"]["states_by_rows_and_prompt"] == 1


def test_hogwild_is_measured_for_every_number_of_workers(run: Run) -> None:
    report = run("hogwild")
    assert list(report["workers"]) == ["1", "3"]
    assert all(way["tokens_per_second"] > 0 for way in report["workers"].values())
    assert 0 < report["ratios"]["set_up_by_step"] < 1


def short_questions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Replace questions, which are long for the tokenizer of the test, by two tokens each."""
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(module, "question", lambda tokenizer, number: [4 + number % 50, 5 + number // 50 % 50])


def test_the_engine_generates_the_same_tokens_each_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("greenlet")
    short_questions(monkeypatch, "engine")
    report = run("engine")
    assert report["throughput"]["same_tokens"]
    assert report["throughput"]["same_tokens_of_continuous_batching"]
    assert report["single"]["same_tokens"]
    assert report["throughput"]["stats"]["reused_tokens"] > 0
    assert len(report["targets"]) == 4


def test_load_reports_latencies_and_checks_answers(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("greenlet")
    short_questions(monkeypatch, "engine_load")
    report = run("engine_load")
    for entry in report["load"]["rates"]:
        assert entry["errors"] == {}
        assert entry["answered"] + entry["rejected"] == entry["offered"]
    assert report["load"]["check"]["wrong"] == 0
    assert report["load"]["check"]["checked"] > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_all_libraries_of_linear_layers_are_timed(run: Run) -> None:
    for ways in run("linear")["seconds"].values():
        assert {"torch", "onednn"} <= ways.keys()
        assert all(times.keys() == {"1", "4"} and min(times.values()) > 0 for times in ways.values())


def test_a_shorter_state_interval_computes_less_again(run: Run) -> None:
    for rows in run("state_interval")["prompts"].values():
        again = [row["computed_again"] for row in rows.values()]  # from the shortest interval to none
        assert again == sorted(again)
        assert rows["128"]["states"] > rows["None"]["states"]


def test_training_is_measured_each_way() -> None:
    pytest.importorskip("trl")
    training = importlib.import_module("benchmarks.training")
    settings = training.TrainingBenchmark(24, 4, 3, rows=4, rounds=1, memory_rows=(1, 2))

    def peak_of(way: str, rows: int) -> int:
        return {"tree": 50, "full_rows": 10 + 30 * rows}[way]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "PAGE", 16)
        model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
        tokenizer = small_tokenizers.make("split_marker")
        report = settings.run(model, tokenizer, lambda words: None, peak_of)
    assert report["memory"]["full_rows"] == pytest.approx(10 + 30 * 4)
    assert all(value > 0 for value in report["ratios"].values())


def test_peak_memory_is_measured_each_way(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    training = importlib.import_module("benchmarks.training")
    tiny.build("llama").save_pretrained(tmp_path)
    small_tokenizers.make("split_marker").save_pretrained(tmp_path)
    for way in ("tree", "full_rows"):
        assert training.peak_memory(training.TrainingBenchmark(24, 4, 3), str(tmp_path), 1, way, 2) >= 0


def test_ratios_compare_methods_of_the_same_round() -> None:
    quiet_then_noisy = Times(prefill=[2.0, 20.0, 2.0], steps=[[1.0, 1.0], [9.0, 9.0], [1.0, 9.0, 1.0]])
    half = Times(prefill=[1.0, 10.0, 1.0], steps=[[0.5, 0.5], [4.5, 4.5], [0.5, 0.5, 0.5]])
    assert prefill_ratio(quiet_then_noisy, half) == 2
    assert step_ratio(quiet_then_noisy, half) == 2


def test_tables_align_names_left_and_figures_right() -> None:
    table = Table("of numbers", "first", "b")
    table.add_row("one", 1, 22)
    table.add_row("eleven", 11)
    assert str(table).splitlines()[1:] == ["of numbers", "        first   b", "one         1  22", "eleven     11"]


@pytest.mark.parametrize("name", ["gpu", "engine"])
def test_pictures_are_drawn_from_the_reports_of_the_repository(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    assert figures.main([name, str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_runner_lists_benchmarks_and_rejects_unknown_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    assert benchmarks.__main__.main() == 0
    assert {"engine", "shared_prefix", "training"} <= {*capsys.readouterr().out.split()}
    monkeypatch.setattr("sys.argv", ["benchmarks", "nothing"])
    assert benchmarks.__main__.main() == 2
