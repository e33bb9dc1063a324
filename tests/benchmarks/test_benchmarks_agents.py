"""`python -m benchmarks.agents_tot` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import random_stand_in

pytest.importorskip("greenlet")

import benchmarks.report
import hf_parallel
from benchmarks import agents_tot

pytestmark = [pytest.mark.slow]


def test_all_ways_do_the_same_work_and_only_the_cache_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = random_stand_in(tmp_path / "model")
    path = tmp_path / "new" / "result.json"
    monkeypatch.setattr("sys.argv", ["agents_tot", "--quick", "--output", str(path)])
    monkeypatch.setattr(benchmarks.report, "load_model", lambda *options, **marks: (model, tokenizer))
    assert agents_tot.main() == 0
    hf_parallel.disable(model)
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert report["same_trees"] == {"uncached": 1.0, "sequential": 1.0}
    ways = report["ways"]
    assert len({(of["completions"], of["tokens"], of["solved"]) for of in ways.values()}) == 1
    assert ways["cached"]["replayed_tokens"] > 0
    assert ways["uncached"]["replayed_tokens"] == ways["sequential"]["replayed_tokens"] == 0
    assert [target["at_least"] for target in report["targets"]] == [3.0, 1.5, 1.0]
