"""`python -m benchmarks.linear` times all libraries on the same passes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from benchmarks import linear as benchmark
from hf_parallel.kernels import native
from hf_parallel.models import linear
from hf_parallel.models.linear import LINEAR_VARIABLE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("compiled", [True, False])
def test_all_libraries_are_timed_on_the_same_passes(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(native, "unavailable_reason", lambda: "no C compiler was found")
    elif reason := native.unavailable_reason():
        pytest.skip(reason)
    libraries = ("torch", "onednn", "native")[: 2 + compiled]
    monkeypatch.setattr(linear, "LEAST_WEIGHTS", 1)
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")
    model: Any = hf_parallel.enable(tiny.build("llama"))
    served, passed = [], []
    forward = benchmark.forward
    for name in ("_forward", "_forward_by_onednn"):
        by = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda self, x, by=by, name=name: served.append(name) or by(self, x))
    monkeypatch.setattr(benchmark, "forward", lambda *given: passed.append(given[2].num_tokens) or forward(*given))
    try:
        ids = tiny.make_prompts([20])[0][None]
        report = benchmark.LinearBenchmark(12, (1, 5), rounds=2).run(model, ids, lambda words: None)
    finally:
        hf_parallel.disable(model)
    assert passed == [12, *([1] * len(libraries) + [5] * len(libraries)) * 3]
    assert set(served) == {"_forward_by_onednn", *["_forward"] * compiled}
    assert report["settings"]["rounds"] == 2
    for of in report["seconds"].values():
        assert {library: set(times) for library, times in of.items()} == dict.fromkeys(libraries, {"1", "5"})
        assert all(took > 0 for times in of.values() for took in times.values())
    assert report["passes_by_the_shortest"]["onednn"]["1"] == 1.0
    assert os.environ[LINEAR_VARIABLE] == "torch", "the variable is restored"
