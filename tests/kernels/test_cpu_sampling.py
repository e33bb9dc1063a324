"""Sampling from scores in C: the tokens of the warpers one by one, and of `torch.multinomial`."""

from __future__ import annotations

import os
import random
import shutil
import threading
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.processors import ProcessorBatch, stage_of
from hf_parallel.generation.sampling.rng import draw as draw_with_rngs
from hf_parallel.generation.sampling.rng import make_rngs, next_keys
from hf_parallel.generation.sampling.sampler import Sampler, SamplingBatch, SamplingTask
from hf_parallel.generation.sampling.token_table import TokenTable
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


@compiled
@pytest.mark.skipif(not sampling._has_own_noise(), reason="this PyTorch draws noise by MKL")
def test_no_seed_of_another_thread_is_lost_during_draws() -> None:
    probs = torch.rand(1, 50).softmax(dim=-1)
    finished = threading.Event()

    def draw() -> None:
        while not finished.is_set():
            sampling.multinomial(probs)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        lost = 0
        for seed in range(10_000):
            torch.default_generator.manual_seed(seed)
            lost += torch.default_generator.initial_seed() != seed
        assert lost == 0
    finally:
        finished.set()
        thread.join()


@compiled
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_row_draws_the_same_token_alone_and_with_others(top_k: int) -> None:
    scores = (torch.randn(3, 400, generator=torch.Generator().manual_seed(top_k)) * 3).bfloat16().float()  # with ties
    ids = torch.randint(0, 400, (3, 5))

    def draw(rows: list[int], has_scores: bool) -> list[int]:
        config = GenerationConfig(do_sample=True, return_dict_in_generate=has_scores, output_scores=has_scores)
        processors: list[Any] = [RepetitionPenaltyLogitsProcessor(1.3)]
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        processors += [TopPLogitsWarper(0.8), MinPLogitsWarper(0.01)]
        given = LogitsProcessorList(processors)
        table = TokenTable(ids[rows], 0, 40)
        sampler = Sampler(
            config, given, StoppingCriteriaList([MaxLengthCriteria(40)]), table, [7 + row for row in rows]
        )
        tokens: list[int] = []
        for _ in range(30):
            (sampled,) = SamplingBatch([SamplingTask(sampler, range(len(rows)))]).sample([Part(scores[rows])])
            tokens += sampled.read()[0]
        return tokens

    together = draw([0, 1, 2], False)
    assert draw([0, 1, 2], True) == together
    for row in range(3):
        assert draw([row], False) == together[row::3]
        assert draw([row], True) == together[row::3]


@compiled
def test_rows_that_cannot_be_drawn_advance_no_generator() -> None:
    config = GenerationConfig(do_sample=True)
    for seed in (None, 5):
        processors = LogitsProcessorList([TopKLogitsWarper(5)])
        table = TokenTable(torch.zeros(2, 3, dtype=torch.int64), 0, 9)
        sampler = Sampler(config, processors, StoppingCriteriaList([MaxLengthCriteria(9)]), table, seed)
        logits = torch.randn(2, 60)
        logits[1] = torch.nan
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="cannot draw: the probabilities of rows \\[1\\]"):
            SamplingBatch([SamplingTask(sampler, [0, 1])]).sample([Part(logits)])
        assert torch.equal(state, torch.get_rng_state())
        assert sampler.table.lengths == [3, 3]
        assert sampler.rngs is None or [rng.count for rng in sampler.rngs] == [0, 0]
