"""`python -m benchmarks`: a quick run on a tiny model, and the figures of its report."""

from __future__ import annotations

import io
import json
import statistics
import time
from contextlib import redirect_stdout
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch

import benchmarks.__main__
import hf_parallel
from benchmarks.hogwild import SetUpClock
from benchmarks.rounds import Times, prefill_ratio, step_ratio
from hf_parallel import BlockCache
from hf_parallel.cache import Segment
from hf_parallel.kernels import AttentionPlan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Any]:
    """Return the report of `python -m benchmarks --quick` for a tiny model."""
    folder = tmp_path_factory.mktemp("benchmarks")
    model, path = str(folder / "model"), folder / "new" / "result.json"
    tiny.build("llama").save_pretrained(model)
    small_tokenizers.make("split_marker").save_pretrained(model)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("sys.argv", ["benchmarks", "--quick", "--model", model, "--output", str(path)])
        assert benchmarks.__main__.main() == 0
    assert "shared_prefix: decode step relative to the bound" in printed.getvalue()
    assert str(path) in printed.getvalue().replace("\n", "")
    return json.loads(path.read_text())


def test_report_describes_machine_and_settings(report: dict[str, Any]) -> None:
    machine = report["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 1
    assert machine["cores"] >= 1
    assert {"date", "cpu", "device", "dtype", "python", "transformers", "load_average_before"} <= set(machine)
    assert report["shared_prefix"]["settings"]["rows"] == 3
    assert report["hogwild"]["settings"]["prompt"] == 48


def test_every_method_has_the_tokens_of_generate(report: dict[str, Any]) -> None:
    result = report["shared_prefix"]
    assert result["same_tokens_as"] == "generate"
    assert result["shared_prefix"]["same_tokens"]
    assert result["prefilled_cache"]["same_tokens"]
    assert result["generate_batch"].get("same_tokens", "error" in result["generate_batch"])


def test_every_method_is_timed_per_step(report: dict[str, Any]) -> None:
    result = report["shared_prefix"]
    new_tokens, rounds = result["settings"]["new_tokens"], result["settings"]["rounds"]
    for name in ("bound", "shared_prefix", "prefilled_cache", "generate"):
        assert [len(steps) for steps in result[name]["steps"]] == [new_tokens - 1] * rounds, name
        seconds = [second for steps in result[name]["steps"] for second in steps]
        assert result[name]["step_seconds"] == pytest.approx(statistics.median(seconds), abs=1e-5)
        assert result[name]["tokens_per_second"] == pytest.approx(3 / result[name]["step_seconds"])
    for name in ("one_row", "shared_prefix", "prefilled_cache", "generate"):
        assert result[name]["prefill_seconds"] > 0
    for name in ("generate", "hogwild"):
        assert len(report["hogwild"][name]["steps"][0]) == report["hogwild"]["settings"]["passes"] - 1


def test_shared_prefix_is_computed_and_stored_once(report: dict[str, Any]) -> None:
    result = report["shared_prefix"]
    assert result["shared_prefix"]["stats"]["prefilled_tokens"] == 48
    assert result["ratios"]["kv_bytes_by_unique_tokens"] == 1
    assert result["generate"]["kv_bytes"] == result["prefilled_cache"]["kv_bytes"]
    assert result["shared_prefix"]["kv_bytes"] / result["generate"]["kv_bytes"] == (48 + 3 * 3) / (3 * (48 + 3))


def test_hogwild_is_measured_for_every_number_of_workers(report: dict[str, Any]) -> None:
    result = report["hogwild"]
    assert list(result["workers"]) == ["1", "3"]
    assert all(way["tokens_per_second"] > 0 for way in result["workers"].values())
    assert 0 < result["set_up_seconds"] < result["hogwild"]["step_seconds"]


def test_targets_follow_from_the_ratios(report: dict[str, Any]) -> None:
    values = [target["value"] for target in report["targets"]]
    assert values == [
        report["shared_prefix"]["ratios"]["prefill_by_one_row"],
        report["shared_prefix"]["ratios"]["step_by_bound"],
        report["shared_prefix"]["ratios"]["kv_bytes_by_unique_tokens"],
        report["hogwild"]["ratios"]["step_by_generate"],
        report["hogwild"]["ratios"]["set_up_by_step"],
    ]
    assert all(target["met"] == (target["value"] <= target["at_most"]) for target in report["targets"])


def test_ratios_compare_methods_of_the_same_round() -> None:
    quiet_then_noisy = Times(prefill=[2.0, 20.0, 2.0], steps=[[1.0, 1.0], [9.0, 9.0], [1.0, 9.0, 1.0]])
    half = Times(prefill=[1.0, 10.0, 1.0], steps=[[0.5, 0.5], [4.5, 4.5], [0.5, 0.5, 0.5]])
    assert prefill_ratio(quiet_then_noisy, half) == 2
    assert step_ratio(quiet_then_noisy, half) == 2


def test_set_up_clock_measures_work_outside_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = BlockCache.prepare_run

    def slow_prepare(cache: BlockCache, passes: Any) -> Any:
        time.sleep(0.02)
        return prepare(cache, passes)

    model = hf_parallel.enable(tiny.build("llama"))
    ids = tiny.make_prompts([9])[0][None].repeat(2, 1)

    def set_up() -> list[float]:
        clock = SetUpClock()
        with clock.attached():
            model.generate(ids, generation_mode="shared_prefix", max_new_tokens=5, do_sample=False, streamer=clock)
        assert len(clock.set_up_seconds) == len(clock.step_seconds)
        assert all(0 < own < whole for own, whole in zip(clock.set_up_seconds, clock.step_seconds, strict=True))
        return clock.set_up_seconds

    try:
        usual, cached = statistics.median(set_up()), AttentionPlan.cached
        monkeypatch.setattr(BlockCache, "prepare_run", slow_prepare)
        assert statistics.median(set_up()) - usual == pytest.approx(0.02, abs=0.01)
        assert BlockCache.prepare_run is slow_prepare
        assert AttentionPlan.cached is cached
    finally:
        hf_parallel.disable(model)


def test_set_up_clock_counts_nested_work_once() -> None:
    cache, clock = BlockCache(), SetUpClock()
    plan = cache.prepare([Segment([cache.new_block()], 1)]).plan
    with clock.attached():
        plan.cached("outer", lambda: plan.cached("inner", lambda: time.sleep(0.05)))
        plan.cached("outer", lambda: time.sleep(0.05))
    assert clock.set_up == pytest.approx(0.05, abs=0.03)
