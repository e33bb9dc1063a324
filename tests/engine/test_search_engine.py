"""Searches in an engine get the tokens that they get alone: faults, small budgets, cancellations, other requests."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
import tiny
from engine_requests import run_with_faults

import hf_parallel

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
MODES = ("search", "search", "search", "best_of", "shared_prefix", None)


def run_searches(name: str, seed: int, count: int) -> Counter[str]:
    """Run random requests, most of them searches, and a quarter more of them again; return how many ended how."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)), batch_invariant=True)
    return run_with_faults(model, random.Random(f"search {name} {seed}"), count, MODES, True, simple=0.0)


def test_random_searches_with_faults_end_with_their_tokens() -> None:
    ends = run_searches("llama", 0, 8)
    assert ends["ended search"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_hundreds_of_searches_with_faults_end_with_their_tokens(name: str) -> None:
    """Of all models 1,020 requests, half of them searches, with budgets and cancellations."""
    ends: Counter[str] = Counter()
    for seed in range(1, 21):
        ends += run_searches(name, seed, count=14)
    assert ends["ended"] + ends["cancelled"] + ends["raised"] == 340
    assert ends["ended search"] > 60
    assert ends["cancelled"]
    assert ends["raised"]
    assert ends["preemptions"]
