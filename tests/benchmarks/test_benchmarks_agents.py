"""`python -m benchmarks.agents_tot` on a tiny model, and the figures of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages import random_stand_in

pytest.importorskip("greenlet")

import benchmarks.report
import hf_parallel
from benchmarks import agents_tot
from benchmarks.agents_tot import WAYS, same_trees

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Any]:
    """Return the report for a small random model."""
    folder = tmp_path_factory.mktemp("agents_tot")
    model, tokenizer = random_stand_in(folder / "model")
    path = folder / "new" / "result.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["agents_tot", "--quick", "--output", str(path)])
        patched.setattr(benchmarks.report, "load_model", lambda *options, **marks: (model, tokenizer))
        assert agents_tot.main() == 0
    hf_parallel.disable(model)
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_all_ways_do_the_same_work(report: dict[str, Any]) -> None:
    assert report["same_trees"] == {"uncached": 1.0, "sequential": 1.0}
    assert len({(of["completions"], of["tokens"], of["solved"]) for of in report["ways"].values()}) == 1
    assert [*report["ways"]] == [*WAYS]
    assert len(report["settings"]["puzzles"]) == 2


def test_only_the_cache_replays_tokens(report: dict[str, Any]) -> None:
    assert report["ways"]["cached"]["replayed_tokens"] > 0
    assert report["ways"]["uncached"]["replayed_tokens"] == report["ways"]["sequential"]["replayed_tokens"] == 0
    assert report["ways"]["cached"]["passes"] < report["ways"]["sequential"]["passes"]


def test_targets_follow_from_the_ratios(report: dict[str, Any]) -> None:
    seconds = {way: of["seconds"] for way, of in report["ways"].items()}
    values = [target["value"] for target in report["targets"]]
    assert values == [seconds["sequential"] / seconds["cached"], seconds["uncached"] / seconds["cached"], 1.0]
    assert [target["at_least"] for target in report["targets"]] == [3.0, 1.5, 1.0]
    assert report["generate_by_single"] > 0


def test_trees_are_compared_by_agent_state_and_text() -> None:
    trees = {"a": [("a", "0.0", "x")], "b": [("b", "0.0", "x")]}
    assert same_trees(trees, trees) == 1
    assert same_trees(trees, {"a": [("a", "0.0", "x")], "b": [("b", "0.0", "y")]}) == 0.5
    assert same_trees(trees, {"a": [("a", "0.0", "x")]}) == 0.5


def test_puzzles_of_a_file_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "puzzles.csv"
    path.write_text("Rank,Puzzles\n1,1 1 4 6\n")
    monkeypatch.setattr("sys.argv", ["agents_tot", "--puzzles", str(path)])
    assert agents_tot._parse().puzzles == path
