"""`python -m benchmarks.engine` runs, compares the same tokens each way, and offers requests when they arrive."""

from __future__ import annotations

import asyncio
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
from benchmarks import engine_load as load  # noqa: E402
from benchmarks import engine_servers as servers  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

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


def test_all_ways_generate_the_same_tokens_and_each_part_of_a_step_is_measured(run: Run) -> None:
    report = run()
    throughput = report["throughput"]
    assert throughput["same_tokens"]
    assert throughput["same_tokens_of_continuous_batching"]
    assert report["single"]["same_tokens"]
    assert {target["what"] for target in report["targets"]} == {words for *_, words in benchmark.TARGETS}
    step = report["step"]
    assert {name for name, *_ in benchmark.PARTS} <= {
        *step,
        "cpu.grow_storage",
        "cpu.sample_alone",
    }  # not in every step
    assert 0 < step["overhead"] < step["step"]
    assert throughput["stats"]["reused_tokens"] > 0


def test_load_and_soak_report_latencies_and_check_answers(run: Run) -> None:
    report = run("--load", "--soak", "0.01")
    for entry in (*report["load"]["rates"], report["soak"]):
        assert entry["errors"] == {}
        assert entry["answered"] + entry["rejected"] == entry["offered"]
    assert report["load"]["check"]["wrong"] == report["soak"]["check"]["wrong"] == 0
    assert report["soak"]["memory"]["idle_after"]["used"] == 0
    rates = [entry["rate"] for entry in report["load"]["rates"]]
    lines = {**engine_figure.latencies(report, "first_token"), "rejected": engine_figure.rejected(report)}
    assert [[rate for rate, _ in line] for line in lines.values()] == [rates] * 3
    for (_, median), (_, highest) in zip(lines["p50"], lines["p99"], strict=True):
        assert 0 < median <= highest


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    times = {"p50": 0.1, "p99": 0.2}
    entry = {"rate": 1.0, "offered": 4, "rejected": 1, "first_token": times, "between_tokens": times}
    none = {"rate": 2.0, "offered": 4, "rejected": 4, "first_token": {}, "between_tokens": {}}
    report = {"load": {"requests_per_second": 1.5, "rates": [entry, none]}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert engine_figure.main([str(tmp_path / "report.json"), str(tmp_path / "engine.png")]) == 0
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")


def test_arrivals_are_those_of_the_seed_at_the_rate() -> None:
    drawn = [load.arrivals(lambda number: [number], 50.0, 20.0, (3, 5), seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert 850 < len(drawn[0]) < 1150
    assert [arrival.prompt for arrival in drawn[0]] == [[number] for number in range(len(drawn[0]))]
    assert {arrival.new_tokens for arrival in drawn[0]} == {3, 4, 5}


def test_requests_are_sent_when_they_arrive_though_earlier_ones_are_unanswered() -> None:
    arrived = asyncio.Event()

    class Slow:
        async def send(self, arrival: Any, now: Any, answer: Any) -> None:
            if arrival.number == 0:
                await arrived.wait()  # for the answer of the other
                answer.times.append(now())
            elif arrival.number == 1:
                arrived.set()
                answer.times.append(now())
            else:
                raise ConnectionError("closed")

        def usage(self) -> dict[str, float]:
            return {}

    requests = [servers.Arrival(number, 0.02 * number, [1], 1, False) for number in range(3)]
    first, second, failed = asyncio.run(load.offer(Slow(), requests, limit=5.0))
    assert first.times[0] >= 0.02
    assert second.times[0] < 1.0
    assert failed.status == "ConnectionError: closed"
    found = load.summary([first, second, failed])
    assert (found["offered"], found["answered"], found["errors"]) == (3, 2, {"ConnectionError: closed": 1})


@pytest.mark.parametrize("url", ["http://example.com:80", "https://127.0.0.1", "file:///127.0.0.1", "127.0.0.1:80"])
def test_no_other_machine_is_put_under_load(url: str) -> None:
    assert servers.check_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000/"
    with pytest.raises(ArgumentTypeError, match=r"this machine"):
        servers.check_url(url)
