"""`python -m benchmarks.resample` and `benchmarks.hotspots` on tiny models, and the figures of their reports."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import one_layer
import pytest
import tiny
import torch
from rich.console import Console

import benchmarks.__main__
import hf_parallel
from benchmarks import cache_stress, resample
from benchmarks.cache_stress import Stress
from benchmarks.hotspots import decode
from benchmarks.resample import WAYS, ResampleBenchmark, below_single_path, makes, show, solvable
from hf_parallel import Hotspot
from hf_parallel.generation.replay.policies import uncertainty_of

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, LENGTH = 6, 6


class Chat:
    """The part of a tokenizer that the benchmark uses."""

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(character) for character in messages[0]["content"]]])}

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report for a model of one layer."""
    path = tmp_path_factory.mktemp("resample") / "new" / "result.json"
    options = ["--puzzles", "1", "--samples", str(SAMPLES), "--length", str(LENGTH), "--overhead-rounds", "2"]
    options += ["--temperatures", "0.2", "0.8"]
    model = one_layer.build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["resample", *options, "--stress", "0.3", "--output", str(path)])
        patch.setattr(benchmarks.__main__, "load_model", lambda *options, **marks: (model, Chat()))
        assert resample.main() == 0
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_every_method_is_measured_at_every_setting(report: dict[str, Any]) -> None:
    assert [(r["top_p"], r["temperature"]) for r in report["results"]] == [
        (top_p, temperature) for top_p in (1.0, 0.9) for temperature in (0.2, 0.8)
    ]
    for result in report["results"]:
        for way in WAYS:
            of = result[way]
            timed = SAMPLES - 1 if way in ("stepwise", "hotspot") else ResampleBenchmark.baseline_samples
            assert of["samples"] + of["replayed_whole"] == timed
            if of["samples"]:
                assert of["mean_tokens_per_second"] > 0
                assert of["median_speed_up"] > 0
                assert 0 <= of["hit_ratio"] < 1
            else:
                assert of["speed_up"] is of["median_speed_up"] is None
        assert result["none"]["hit_ratio"] == 0
    assert any(result["stepwise"]["samples"] and result["stepwise"]["hit_ratio"] > 0 for result in report["results"])


def test_overhead_is_measured_without_hits(report: dict[str, Any]) -> None:
    overhead = report["overhead"]
    assert {way: len(seconds) for way, seconds in overhead["seconds"].items()} == {"none": 2, "cold": 2, "no hits": 2}
    for way, ratio in overhead["ratios"].items():
        pairs = zip(overhead["seconds"][way], overhead["seconds"]["none"], strict=True)
        assert ratio == pytest.approx(np.median([ours / plain for ours, plain in pairs]))


def test_threads_lose_no_state_and_read_no_wrong_logits(report: dict[str, Any]) -> None:
    roomy, full = report["stress"]
    for stress in (roomy, full):
        assert stress["wrong"] == stress["lost"] == 0
        assert stress["operations"] == stress["reads"] + stress["writes"] > 1000
        assert stress["most_bytes"] <= stress["max_bytes"]
    assert roomy["most_bytes"] < roomy["max_bytes"] / 2
    assert full["most_bytes"] > 0.9 * full["max_bytes"]


def test_stress_detects_wrong_and_lost_states(monkeypatch: pytest.MonkeyPatch) -> None:
    stress = Stress(0.1, 1 << 30)
    monkeypatch.setattr(cache_stress, "logits_of", lambda tokens: torch.rand(64))
    assert stress.run()["wrong"] > 0
    monkeypatch.undo()
    stress = Stress(0.1, 1 << 30)
    missing = Stress._missing
    monkeypatch.setattr(Stress, "_missing", lambda self: (self.cache.clear(), missing(self))[1])
    assert stress.run()["lost"] > 0


def test_the_table_shows_every_figure(report: dict[str, Any]) -> None:
    console = Console(width=150, record=True)
    show(console, report)
    text = console.export_text()
    for expected in (
        "single path",
        "stepwise: mean speed-up",
        "without hits (no hits)",
        "0 wrong answers",
    ):
        assert expected in text


def test_methods_slower_than_a_single_path_are_listed() -> None:
    speeds = {"single path": 2.0, "stepwise": 1.9, "hotspot": 2.5}
    result: dict[str, Any] = {way: {"speed_up": speed} for way, speed in speeds.items()}
    whole: dict[str, Any] = {way: {"speed_up": None} for way in speeds}
    results = [result | {"top_p": 1.0, "temperature": 0.4}, whole | {"top_p": 1.0, "temperature": 0.2}]
    assert below_single_path(results) == [("stepwise", 1.0, 0.4)]


def test_puzzles_can_be_solved() -> None:
    assert makes(tuple(map(Fraction, (4, 5, 6, 10))))
    assert makes(tuple(map(Fraction, (3, 3, 8, 8))))  # needs fractions: 8 / (3 - 8 / 3)
    assert not makes(tuple(map(Fraction, (1, 1, 1, 1))))
    assert len(set(itertools.islice(solvable(), 20))) == 20


def test_hotspots_of_an_answer_are_those_of_its_logits() -> None:
    model = hf_parallel.enable(tiny.build("llama"))
    try:
        ids = tiny.make_prompts([20])[0][None]
        answer = decode(model, Chat(), ids, Hotspot(2.3), seed=1, max_new_tokens=LENGTH, eos_token_id=None)
        whole = model.generate(ids, generation_mode="shared_prefix", do_sample=True, seed=1, max_new_tokens=LENGTH)
    finally:
        hf_parallel.disable(model)
    assert answer.tokens == [chr(token) for token in whole[0, 20:].tolist()]
    with torch.no_grad():
        logits = model(whole).logits[0, 19:-1]
    scores = [uncertainty_of(row) * math.pow(0.999, step) for step, row in enumerate(logits)]
    np.testing.assert_allclose(answer.scores, scores, rtol=1e-4)
    assert answer.hotspots.tolist() == [score > 2.3 for score in answer.scores]
    assert 0 < answer.hotspots.sum() < LENGTH
