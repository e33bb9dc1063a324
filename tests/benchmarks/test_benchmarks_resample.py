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

import benchmarks.report
import hf_parallel
from benchmarks import resample
from benchmarks.hotspots import decode
from benchmarks.resample import WAYS, ResampleBenchmark, makes, solvable
from hf_parallel import Hotspot
from hf_parallel.generation.replay.policies import uncertainty_of

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
        patch.setattr("sys.argv", ["resample", *options, "--output", str(path)])
        patch.setattr(benchmarks.report, "load_model", lambda *options, **marks: (model, Chat()))
        assert resample.main() == 0
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_every_method_is_measured_at_every_setting(report: dict[str, Any]) -> None:
    assert [(r["top_p"], r["temperature"]) for r in report["results"]] == [
        (top_p, temperature) for top_p in (1.0, 0.9) for temperature in (0.2, 0.8)
    ]
    for result in report["results"]:
        for way in WAYS:
            timed = SAMPLES - 1 if way in ("stepwise", "hotspot") else ResampleBenchmark.baseline_samples
            assert result[way]["samples"] + result[way]["replayed_whole"] == timed
        assert result["none"]["hit_ratio"] == 0
    assert any(result["stepwise"]["hit_ratio"] for result in report["results"])
    assert all(ratio > 0 for ratio in report["overhead"]["ratios"].values())


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
