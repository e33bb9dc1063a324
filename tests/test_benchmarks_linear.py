"""`python -m benchmarks.linear`: both libraries are timed, in turns, on the same passes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from benchmarks import linear as benchmark
from hf_parallel import linear
from hf_parallel.linear import LINEAR_VARIABLE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_both_libraries_are_timed_on_the_same_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LEAST_WEIGHTS", 1)
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")
    model: Any = hf_parallel.enable(tiny.build("llama"))
    served, passed = [], []
    by_onednn, forward = linear._forward, benchmark.forward
    monkeypatch.setattr(linear, "_forward", lambda self, x: served.append(x.shape[1]) or by_onednn(self, x))
    monkeypatch.setattr(benchmark, "forward", lambda *given: passed.append(given[2].num_tokens) or forward(*given))
    try:
        ids = tiny.make_prompts([20])[0][None]
        report = benchmark.LinearBenchmark(12, (1, 5), rounds=2).run(model, ids, lambda words: None)
    finally:
        hf_parallel.disable(model)
    assert passed == [12, *[1, 1, 5, 5] * 3]
    assert set(served) == {1, 5}
    assert report["settings"]["rounds"] == 2
    for of in report["seconds"].values():
        assert {library: set(times) for library, times in of.items()} == dict.fromkeys(("torch", "onednn"), {"1", "5"})
        assert all(took > 0 for times in of.values() for took in times.values())
    assert report["passes_by_the_shortest"]["onednn"]["1"] == 1.0
    assert os.environ[LINEAR_VARIABLE] == "torch", "what was asked for before"
