"""Sampling from scores in C: the tokens of the warpers one by one, and of `torch.multinomial`."""

from __future__ import annotations

import os
import random
import shutil
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_parallel.generation.sampling.processors import ProcessorBatch, stage_of
from hf_parallel.generation.sampling.rng import draw as draw_with_rngs
from hf_parallel.generation.sampling.rng import make_rngs, next_keys
from hf_parallel.kernels import sampling

compiled = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None, reason="needs a C compiler, as the kernel itself does"
)


def warpers_of(settings: sampling.Warpers) -> list[Any]:
    """Return Transformers' warpers with settings, in the order of `generate`."""
    found: list[Any] = [TemperatureLogitsWarper(settings.temperature), TopKLogitsWarper(settings.top_k)]
    if settings.top_p < 1:
        found.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0:
        found.append(MinPLogitsWarper(settings.min_p))
    return found


@compiled
@pytest.mark.skipif(not sampling._has_own_noise(), reason="this PyTorch draws noise by MKL")
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 37), (3, 1000), (17, 20_000)])
def test_one_operation_samples_what_the_warpers_and_torch_sample(rows: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    rng = random.Random(rows)
    for _ in range(60):
        settings = sampling.Warpers(
            temperature=rng.choice([0.25, 0.6, 1.0, 1.7]),
            top_k=rng.choice([2, 5, 50, 128]),
            top_p=rng.choice([0.01, 0.5, 0.95, 1.0]),
            min_p=rng.choice([0.0, 0.05, 0.9]),
        )
        scores = torch.randn(rows, vocabulary, generator=generator) * rng.choice([0.5, 3, 10])
        scores[:, ::7] = -torch.inf
        if rng.random() < 0.3:
            scores = scores.bfloat16().float()  # with ties
        one_by_one = by_transformers = scores
        for warper in warpers_of(settings):
            _, apply = stage_of(warper) or pytest.fail("no stage")
            one_by_one = apply(one_by_one, ProcessorBatch([warper] * rows, [*range(rows)], [1] * rows))
            by_transformers = warper(None, by_transformers)
        probs = sampling.softmax(one_by_one)
        torch.testing.assert_close(probs, one_by_one.softmax(dim=-1))
        # Of tokens with equal scores, Transformers' sort is free to leave any.
        assert torch.equal((probs > 0).sum(-1), (by_transformers.softmax(dim=-1) > 0).sum(-1))

        state = torch.get_rng_state()
        tokens, marks, of_tokens = sampling.sample(scores, settings, None)
        drawn = [*tokens.tolist(), *torch.rand(3).tolist()]
        for draw in (sampling.multinomial, lambda probs: torch.multinomial(probs, 1)[:, 0]):
            torch.set_rng_state(state)
            assert [*draw(probs).tolist(), *torch.rand(3).tolist()] == drawn
        assert marks is None
        assert torch.equal(of_tokens, probs.gather(1, tokens[:, None])[:, 0])

        seeded, _, _ = sampling.sample(scores, settings, next_keys(make_rngs(5, rows), scores.device))
        assert torch.equal(seeded, draw_with_rngs(probs, make_rngs(5, rows)))


@compiled
@pytest.mark.skipif(not sampling._has_own_noise(), reason="this PyTorch draws noise by MKL")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_probabilities_are_marked(value: float) -> None:
    scores = torch.randn(3, 100)
    scores[1] = value
    for keys in (None, torch.arange(3)):
        tokens, marks, probs = sampling.sample(scores, sampling.Warpers(top_k=5, top_p=0.9, min_p=0.1), keys)
        assert marks is not None
        assert marks.tolist() == [0, 2, 0]
        assert tokens[1] == 0
        assert probs.isnan().tolist() == [False, True, False]
