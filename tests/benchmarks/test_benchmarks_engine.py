"""`python -m benchmarks.engine` runs, compares the same tokens each way, and offers requests when they arrive."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tiny

pytest.importorskip("greenlet")

from benchmarks import engine as benchmark  # noqa: E402
from benchmarks import engine_figure  # noqa: E402
from benchmarks import engine_servers as servers  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with options on a tiny model; return its report."""
    tiny.build("llama").save_pretrained(tmp_path / "model")
    small_tokenizers.make("split_marker").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(benchmark, "PAGE", 16)
    monkeypatch.setattr(benchmark, "question", lambda tokenizer, number: [4 + number % 50, 5 + number // 50 % 50])

    def run(*options: str) -> dict[str, Any]:
        given = ["engine", "--quick", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "report.json")]
        monkeypatch.setattr(sys, "argv", [*given, *options])
        assert benchmark.main() == 0
        return json.loads((tmp_path / "report.json").read_text())

    return run


def test_all_ways_generate_the_same_tokens(run: Run) -> None:
    report = run()
    throughput = report["throughput"]
    assert throughput["same_tokens"]
    assert throughput["same_tokens_of_continuous_batching"]
    assert report["single"]["same_tokens"]
    assert {target["what"] for target in report["targets"]} == {words for *_, words in benchmark.TARGETS}
    assert 0 < throughput["decode_step"]["overhead"] < throughput["decode_step"]["step"]
    assert throughput["stats"]["reused_tokens"] > 0


def test_load_reports_latencies_and_checks_answers(run: Run) -> None:
    report = run("--load")
    for entry in report["load"]["rates"]:
        assert entry["errors"] == {}
        assert entry["answered"] + entry["rejected"] == entry["offered"]
    assert report["load"]["check"]["wrong"] == 0


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    times = {"p50": 0.1, "p99": 0.2}
    entry = {"rate": 1.0, "offered": 4, "rejected": 1, "first_token": times, "between_tokens": times}
    none = {"rate": 2.0, "offered": 4, "rejected": 4, "first_token": {}, "between_tokens": {}}
    report = {"load": {"requests_per_second": 1.5, "rates": [entry, none]}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert engine_figure.main([str(tmp_path / "report.json"), str(tmp_path / "engine.png")]) == 0
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("url", ["http://example.com:80", "https://127.0.0.1", "file:///127.0.0.1", "127.0.0.1:80"])
def test_no_other_machine_is_put_under_load(url: str) -> None:
    assert servers.check_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000/"
    with pytest.raises(ArgumentTypeError, match=r"this machine"):
        servers.check_url(url)
