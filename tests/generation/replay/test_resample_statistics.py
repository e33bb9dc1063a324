"""Chi-square tests: samples diverge from a cached continuation with the probabilities of the model.

The first divergence is the first token of a sample that differs from a reference continuation. Its distribution is
exact: P(step t, token v) is the probability of the reference up to t, times that of v after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tiny
import torch
from transformers import PreTrainedModel

import hf_parallel
from benchmarks.resample import keep_last_path
from hf_parallel import LogitsCache, ReplayPolicy, Stepwise
from hf_parallel.cache.fingerprint import fingerprint

ROWS = 2000
CALLS = 5
NEW = 5
CHOICES = 5
SETTINGS = {"do_sample": True, "top_k": CHOICES, "temperature": 0.9, "max_new_tokens": NEW, "min_new_tokens": NEW}
PROMPT = tiny.make_prompts([16], seed=4)[0][None]

Divergence = tuple[int, int]
"""Step and token."""


class EverySecond(ReplayPolicy):
    """Not lossless: keeps the cached token at every second step."""

    def draws(self, uncertainty: np.ndarray, start: int) -> np.ndarray:
        return (start + np.arange(len(uncertainty))) % 2 == 1


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> list[int]:
    """A sampled continuation."""
    torch.manual_seed(1)
    return model.generate(PROMPT, **SETTINGS)[0, PROMPT.shape[1] :].tolist()  # type: ignore[operator]


@pytest.fixture(scope="module")
def exact(model: PreTrainedModel, reference: list[int]) -> dict[Divergence, float]:
    """Probability of each first divergence, given that there is one within `NEW` tokens."""
    probs, row, reached = {}, PROMPT[0], 1.0
    for step, expected in enumerate(reference):
        with torch.no_grad():
            best = (model(row[None]).logits[0, -1].double() / SETTINGS["temperature"]).topk(CHOICES)
        next_probs = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
        stay = next_probs.pop(expected)
        probs |= {(step, token): reached * prob for token, prob in next_probs.items()}
        reached, row = reached * stay, torch.cat((row, torch.tensor([expected])))
    return {divergence: prob / sum(probs.values()) for divergence, prob in probs.items()}


def divergences(
    model: PreTrainedModel,
    reference: list[int],
    policy: ReplayPolicy | None,
    single_path: bool = False,
    calls: int = CALLS,
) -> dict[Divergence, int]:
    """Count first divergences; without a policy there is no cache."""
    counts: dict[Divergence, int] = {}
    torch.manual_seed(7)
    cache = None if policy is None else filled_cache(model, reference, single_path)
    for _ in range(calls):
        more = {} if cache is None else {"logits_cache": cache, "replay": policy}
        mode = "shared_prefix" if cache is None else "resample"
        ids = PROMPT.expand(ROWS, -1)
        rows = model.generate(ids, generation_mode=mode, **SETTINGS, **more)[:, PROMPT.shape[1] :]  # type: ignore[operator]
        differs = rows != torch.tensor(reference)
        first = differs.int().argmax(dim=1)
        tokens = rows.gather(1, first[:, None])[:, 0]
        for step, token, diverged in zip(first.tolist(), tokens.tolist(), differs.any(dim=1).tolist(), strict=True):
            if diverged:
                counts[step, token] = counts.get((step, token), 0) + 1
        if single_path:
            cache = filled_cache(model, reference, single_path)
    return counts


def filled_cache(model: PreTrainedModel, reference: list[int], single_path: bool) -> LogitsCache:
    """Return a cache with the reference, and some samples unless `single_path`."""
    cache = LogitsCache()
    ids = torch.cat((PROMPT, torch.tensor([reference])), dim=1)
    with cache.cursors() as cursors, torch.no_grad():
        key = fingerprint(model)
        cursors.start(0, key, PROMPT[0].tolist())
        logits = model(ids).logits[0, PROMPT.shape[1] - 1 :]
        for token, row_logits in zip(reference, logits, strict=False):
            cursors.store(0, row_logits)
            cursors.advance(0, token)
    if not single_path:
        settings = {"logits_cache": cache, "num_return_sequences": 8, "seed": 5}
        model.generate(PROMPT, generation_mode="resample", **SETTINGS, **settings)  # type: ignore[operator]
    else:
        keep_last_path(cache)
    return cache


def p_value(statistic: float, freedom: int) -> float:
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def fits(counts: dict[Divergence, int], exact: dict[Divergence, float]) -> float:
    """Return the p-value that counts come from a distribution (chi-square; rare divergences are one bin)."""
    assert set(counts) <= set(exact), "sampled a token of probability 0"
    total = sum(counts.values())
    common = [divergence for divergence, prob in exact.items() if prob * total >= 10]
    observed = np.array([counts.get(divergence, 0) for divergence in common], dtype=float)
    expected = np.array([exact[divergence] * total for divergence in common])
    observed, expected = np.append(observed, total - observed.sum()), np.append(expected, total - expected.sum())
    return p_value(float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()), len(common))


def agree(one: dict[Divergence, int], other: dict[Divergence, int]) -> float:
    """Return the p-value that two samples of counts come from one distribution (chi-square)."""
    sums = {key: one.get(key, 0) + other.get(key, 0) for key in {*one, *other}}
    common = [key for key, count in sums.items() if count >= 20]
    table = np.array([[counts.get(key, 0) for key in common] for counts in (one, other)], dtype=float)
    rest = np.array([[sum(counts.values())] for counts in (one, other)]) - table.sum(1, keepdims=True)
    table = np.concatenate((table, rest), axis=1) if rest.sum() else table
    expected = table.sum(0) * table.sum(1, keepdims=True) / table.sum()
    return p_value(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


@pytest.mark.slow
def test_replayed_samples_diverge_with_the_probabilities_of_the_model(
    model: PreTrainedModel, reference: list[int], exact: dict[Divergence, float]
) -> None:
    plain = divergences(model, reference, None)
    trie = divergences(model, reference, Stepwise())
    path = divergences(model, reference, Stepwise(), single_path=True)
    for counts in (plain, trie, path):
        assert sum(counts.values()) >= 8_000
        assert fits(counts, exact) > 1e-3
    for counts in (trie, path):
        assert agree(counts, plain) > 1e-3
    assert agree(trie, path) > 1e-3


def test_a_policy_that_keeps_every_second_token_is_rejected(
    model: PreTrainedModel, reference: list[int], exact: dict[Divergence, float]
) -> None:
    counts = divergences(model, reference, EverySecond(), single_path=True, calls=2)
    assert fits(counts, exact) < 1e-6
