"""Stepwise replay with the embedded model: samples equal those without a cache, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.generation.rng import exponential_noise, make_rngs

SAMPLES, NEW, SEED = 32, 64, 3
TEMPERATURES = (0.2, 0.6, 1.0)
TIE = 1e-4
"""A smaller difference of logits is a tie: batches of other shapes round differently by as much."""


@pytest.fixture(scope="module")
def model(embedded: Any) -> Any:
    yield hf_parallel.enable(embedded[0])
    hf_parallel.disable(embedded[0])


@pytest.fixture(scope="module")
def prompt(embedded: Any) -> torch.Tensor:
    message = {"role": "user", "content": "Use 4, 5, 6 and 10 once each, with + - * / and brackets, to get 24."}
    encoded = embedded[1].apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def sample(model: Any, prompt: torch.Tensor, temperature: float, rows: int, **settings: Any) -> Any:
    return model.generate(
        prompt,
        generation_mode="resample" if "logits_cache" in settings else "shared_prefix",
        num_return_sequences=rows,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        return_dict_in_generate=True,
        **({"seed": SEED, "max_new_tokens": NEW} | settings),
    )


@torch.no_grad()
def with_noise(model: Any, row: torch.Tensor, number: int, step: int, temperature: float, width: int) -> torch.Tensor:
    """Return logits plus the noise that sampling adds (Gumbel-max): the next token of the row is the argmax."""
    logits = model(row[None, : width + step]).logits[0, -1]
    key = make_rngs(SEED, SAMPLES)[number].key(step)  # type: ignore[index]
    return logits - temperature * exponential_noise(torch.tensor(key), torch.arange(len(logits))).log()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_samples_with_and_without_a_cache_are_equal_up_to_ties(
    model: Any, prompt: torch.Tensor, shared: LogitsCache, temperature: float
) -> None:
    width = prompt.shape[1]
    ours = sample(model, prompt, temperature, SAMPLES, logits_cache=shared)
    theirs = sample(model, prompt, temperature, SAMPLES)
    assert ours.stats.replayed_tokens > SAMPLES
    for number, (one, other) in enumerate(zip(ours.sequences, theirs.sequences, strict=True)):
        for position in (one != other).nonzero()[:1, 0].tolist():
            scores = with_noise(model, one, number, position - width, temperature, width)
            assert abs(scores[one[position]] - scores[other[position]]) < TIE


@pytest.fixture(scope="module")
def shared(model: Any, prompt: torch.Tensor) -> LogitsCache:
    """A cache that other samples have filled; logits computed at one temperature are replayed at all."""
    cache = LogitsCache()
    sample(model, prompt, TEMPERATURES[0], 2, seed=SEED + 1, logits_cache=cache)
    sample(model, prompt, TEMPERATURES[-1], 16, seed=SEED + 1, max_new_tokens=4, logits_cache=cache)
    return cache


def test_the_sampled_token_is_the_argmax_of_logits_and_noise_without_a_tie(model: Any, prompt: torch.Tensor) -> None:
    width, temperature = prompt.shape[1], 0.9
    rows = sample(model, prompt, temperature, 2, max_new_tokens=8).sequences
    for number, row in enumerate(rows):
        for step in (0, 3, 7):
            best = with_noise(model, row, number, step, temperature, width).topk(2)
            assert best.indices[0] == row[width + step]
            assert best.values[0] - best.values[1] > TIE
