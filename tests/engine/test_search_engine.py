"""Searches in an engine get the tokens that they get alone: faults, small budgets, cancellations, other requests."""

from __future__ import annotations

import copy
import random

import pytest
import tiny
from engine_requests import run_with_faults

import hf_parallel

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
MODES = ("search", "search", "search", "best_of", "shared_prefix", None)


@pytest.mark.parametrize(
    ("name", "seeds", "count"),
    [
        ("llama", [0], 8),
        *[pytest.param(name, range(1, 4), 16, marks=pytest.mark.slow) for name in ("llama", "gemma3_text", "lfm2")],
    ],
)
def test_random_searches_with_faults_end_with_their_tokens(name: str, seeds: list[int], count: int) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)), batch_invariant=True)
    for seed in seeds:
        ends = run_with_faults(model, random.Random(f"search {name} {seed}"), count, MODES, True)
        assert ends["ended"]
