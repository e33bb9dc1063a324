"""`python -m benchmarks.linear` times all libraries on the same passes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from benchmarks.linear import PROMPT, run


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_all_libraries_are_timed_on_the_same_passes() -> None:
    model: Any = hf_parallel.enable(tiny.build("llama"))
    try:
        seconds = run(model, tiny.make_prompts([PROMPT])[0][None], (1, 5), rounds=2)
    finally:
        hf_parallel.disable(model)
    for ways in seconds.values():
        assert {"torch", "onednn"} <= ways.keys()
        assert all(times.keys() == {"1", "5"} and min(times.values()) > 0 for times in ways.values())
