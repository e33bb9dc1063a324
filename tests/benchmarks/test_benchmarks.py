"""`python -m benchmarks`: a quick run on a tiny model, and the figures of its report."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest
import small_tokenizers
import tiny

import benchmarks.__main__
import benchmarks.generate
from benchmarks.rounds import Times, prefill_ratio, step_ratio


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of `python -m benchmarks --quick` for a tiny model."""
    folder = tmp_path_factory.mktemp("benchmarks")
    model, path = str(folder / "model"), folder / "new" / "result.json"
    tiny.build("llama").save_pretrained(model)
    small_tokenizers.make("split_marker").save_pretrained(model)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("sys.argv", ["benchmarks", "--quick", "--model", model, "--output", str(path)])
        assert benchmarks.generate.main() == 0
    assert "shared_prefix: decode step relative to the bound" in printed.getvalue()
    assert str(path) in printed.getvalue().replace("\n", "")
    return json.loads(path.read_text())


def test_every_method_has_the_tokens_of_generate(report: dict[str, Any]) -> None:
    result = report["shared_prefix"]
    assert result["same_tokens_as"] == "generate"
    assert result["shared_prefix"]["same_tokens"]
    assert result["prefilled_cache"]["same_tokens"]
    assert result["generate_batch"].get("same_tokens", "error" in result["generate_batch"])


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
    assert 0 < result["ratios"]["set_up_by_step"] < 1


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


def test_the_runner_lists_and_runs_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    assert benchmarks.__main__.main() == 0
    assert {"engine", "generate", "training"} <= {*capsys.readouterr().out.split()}
    monkeypatch.setattr("sys.argv", ["benchmarks", "generate", "--help"])
    with pytest.raises(SystemExit, match="0"):
        benchmarks.__main__.main()
    monkeypatch.setattr("sys.argv", ["benchmarks", "nothing"])
    assert benchmarks.__main__.main() == 2
