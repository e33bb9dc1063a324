"""`python -m benchmarks.training` computes the same log-probabilities each way, and reads memory from a line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tiny

import hf_parallel

pytest.importorskip("trl")

from benchmarks import training as benchmark  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def test_all_ways_are_measured_on_the_same_completions(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(benchmark, "PAGE", 16)
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    tokenizer = small_tokenizers.make("split_marker")
    settings = benchmark.TrainingBenchmark(24, 4, 3, rows=4, rounds=1, memory_rows=(1, 2))
    asked: list[tuple[str, int]] = []

    def in_process(way: str, rows: int) -> int:
        asked.append((way, rows))
        return {"tree": 50, "full_rows": 10 + 30 * rows}[way]

    report = settings.run(model, tokenizer, lambda words: None, in_process)
    sums = report["loss"]["sums_of_log_probs"]
    assert sums["tree"] == pytest.approx(sums["full_rows"], rel=1e-5)
    assert sums["tree_logprobs"] == pytest.approx(sums["full_rows"], rel=1e-5)
    assert asked == [("tree", 4), ("full_rows", 1), ("full_rows", 2)]
    assert report["memory"]["full_rows"] == pytest.approx(10 + 30 * 4)
    assert {target["what"] for target in benchmark.compare(report["ratios"], benchmark.TARGETS)} == {
        words for *_, words in benchmark.TARGETS
    }
    assert all(value > 0 for value in report["ratios"].values())


def test_peak_memory_includes_the_gradients(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    small_tokenizers.make("split_marker").save_pretrained(tmp_path)
    settings = benchmark.TrainingBenchmark(24, 4, 3)
    for way in ("tree", "full_rows"):
        assert benchmark.peak_memory(settings, str(tmp_path), 1, way, 2) >= 0
