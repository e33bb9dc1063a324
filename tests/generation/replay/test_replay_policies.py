"""Replay policies: hotspots follow Hive's equations 2 to 4; custom policies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_parallel import Hotspot
from hf_parallel.generation.decoding.replay.policies import uncertainty_of


def score_by_definition(logits: torch.Tensor, step: int, decay: float) -> float:
    """Score of one step by Hive, equations 2 to 4, in plain Python."""
    highest = max(logits.tolist())
    weights = [math.exp(value - highest) for value in logits.tolist()]
    probs = [weight / math.fsum(weights) for weight in weights]
    entropy = math.fsum(-prob * math.log(prob) for prob in probs if prob > 0)
    return entropy * (1 - max(probs)) * math.pow(decay, step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_uncertainty_is_entropy_times_one_minus_the_top_1_probability(dtype: torch.dtype, scale: float) -> None:
    for seed in range(20):
        logits = (torch.randn(300, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
        assert uncertainty_of(logits) == pytest.approx(score_by_definition(logits, 0, 1.0), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize(
    "policy",
    [
        Hotspot(),
        Hotspot(threshold=0.1),
        Hotspot(decay=0.9),
        Hotspot(top_k=3),
        Hotspot(top_k=4, decay=0.5),
        Hotspot(0.0),
    ],
    ids=str,
)
def test_hotspots_are_the_steps_of_the_equations(policy: Hotspot, start: int) -> None:
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.5, 6, 30)[:, None]
    logits = logits[torch.randperm(30, generator=torch.Generator().manual_seed(2))]
    scores = [score_by_definition(row, start + step, policy.decay) for step, row in enumerate(logits)]
    if policy.top_k is None:
        expected = {step for step, score in enumerate(scores) if score > policy.threshold}
    else:
        expected = set(sorted(range(30), key=lambda step: -scores[step])[: policy.top_k])
    draws = policy.draws(np.array([uncertainty_of(row) for row in logits]), start)
    assert set(np.flatnonzero(draws)) == expected
    assert 0 < len(expected) <= 30
