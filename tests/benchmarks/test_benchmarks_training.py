"""`python -m benchmarks.training` in its smallest form."""

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

pytestmark = [pytest.mark.filterwarnings("ignore")]


def test_all_ways_are_measured(monkeypatch: Any) -> None:
    monkeypatch.setattr(benchmark, "PAGE", 16)
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    settings = benchmark.TrainingBenchmark(24, 4, 3, rows=4, rounds=1, memory_rows=(1, 2))

    def in_process(way: str, rows: int) -> int:
        return {"tree": 50, "full_rows": 10 + 30 * rows}[way]

    report = settings.run(model, small_tokenizers.make("split_marker"), lambda words: None, in_process)
    assert report["memory"]["full_rows"] == pytest.approx(10 + 30 * 4)
    assert all(value > 0 for value in report["ratios"].values())


def test_peak_memory_is_measured_each_way(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    small_tokenizers.make("split_marker").save_pretrained(tmp_path)
    settings = benchmark.TrainingBenchmark(24, 4, 3)
    for way in ("tree", "full_rows"):
        assert benchmark.peak_memory(settings, str(tmp_path), 1, way, 2) >= 0
