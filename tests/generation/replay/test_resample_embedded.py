"""Stepwise replay with the embedded model: samples equal those of the model itself, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.generation.rng import draw, exponential_noise, make_rngs

pytestmark = pytest.mark.slow

SAMPLES, NEW, SEED = 5, 10, 3
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
def assert_sampled_from_the_model(model: Any, rows: torch.Tensor, temperature: float) -> None:
    """Every token is the one that the random noise selects from the logits of one plain forward pass over all rows.

    A token may differ from it only where both tie.
    """
    prompt, texts = rows[:1, :-NEW], rows[:, -NEW:]
    before = model(prompt, logits_to_keep=1)
    before.past_key_values.batch_repeat_interleave(len(rows))
    after = model(texts[:, :-1], past_key_values=before.past_key_values).logits
    logits = torch.cat((before.logits.expand(len(rows), -1, -1), after), dim=1)
    rngs = make_rngs(SEED, len(rows))
    assert rngs is not None
    ended = torch.zeros(len(rows), dtype=torch.bool)
    for step, tokens in enumerate(texts.T):
        drawn = draw((logits[:, step] / temperature).softmax(dim=-1), rngs)
        for row in ((drawn != tokens) & ~ended).nonzero()[:, 0].tolist():
            key = make_rngs(SEED, len(rows))[row].key(step)  # type: ignore[index]
            noise = exponential_noise(torch.tensor(key), torch.arange(logits.shape[-1])).log()
            scores = logits[row, step] - temperature * noise
            assert abs(scores[tokens[row]] - scores[drawn[row]]) < TIE
        ended |= tokens == model.generation_config.eos_token_id


@pytest.fixture(scope="module")
def shared(model: Any, prompt: torch.Tensor) -> LogitsCache:
    """A cache that other samples have filled; logits computed at one temperature are replayed at all."""
    cache = LogitsCache()
    sample(model, prompt, TEMPERATURES[0], 2, seed=SEED + 1, logits_cache=cache)
    sample(model, prompt, TEMPERATURES[-1], 16, seed=SEED + 1, max_new_tokens=4, logits_cache=cache)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_samples_with_a_cache_are_those_of_the_model(
    model: Any, prompt: torch.Tensor, shared: LogitsCache, temperature: float
) -> None:
    out = sample(model, prompt, temperature, SAMPLES, logits_cache=shared)
    assert out.stats.replayed_tokens > SAMPLES
    assert_sampled_from_the_model(model, out.sequences, temperature)
