"""Random requests with faults at once: each ends, as it should, and with the tokens that it gets alone."""

from __future__ import annotations

import copy
import random

import pytest
import tiny
from engine_requests import MODES, STATE_MODES, run_with_faults
from hybrids import SETTINGS as HYBRIDS

import hf_parallel

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SAME_BITS = ("llama", "gemma3_text", "lfm2", "deepseek_v3")
ARCHITECTURES = ("llama", "gemma3_text", "lfm2", "qwen3_5_text", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "seeds", "count"),
    [
        ("llama", [0], 5),
        ("lfm2", [2], 5),
        *[pytest.param(name, range(10, 16), 10, marks=pytest.mark.slow) for name in ARCHITECTURES],
    ],
)
def test_random_requests_with_faults_end_with_their_tokens(name: str, seeds: list[int], count: int) -> None:
    same_bits = name in SAME_BITS
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)), batch_invariant=same_bits)
    for seed in seeds:
        rng, modes = random.Random(f"{name} {seed}"), STATE_MODES if name in HYBRIDS else MODES
        ends = run_with_faults(model, rng, count, modes, same_bits)
        assert ends["ended"]
