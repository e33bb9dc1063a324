"""DraftSampler: draft tokens sampled from cached logits are the tokens that the row samples from the same logits."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_drafts import model, write
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.cache.logits_trie import CachedDistribution, CachedLogits, TrieNode
from hf_parallel.generation.resampling.drafts import ONLY_CACHED, DraftSampler, acceptance_rates
from hf_parallel.generation.rng import RowRNG, draw, draw_among
from hf_parallel.kernels.linear import LINEAR_VARIABLE

__all__ = ["model"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_later_keys_of_a_row_are_available_without_advancing_it(ahead: int) -> None:
    probs, tokens = torch.rand(1, 50), torch.arange(50)
    peeked, drawing = RowRNG(3), RowRNG(3)
    expected = draw_among(tokens, probs[0], peeked.key(ahead))
    for _ in range(ahead):
        drawing.skip()
    assert draw(probs, [drawing]).tolist() == [expected]
    assert peeked.next() == RowRNG(3).next()


@pytest.mark.parametrize("temperature", [0.1, 1.5])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("top_k", [None, 20])
def test_a_draft_token_is_the_token_that_the_row_samples(
    temperature: float, truncated: bool, top_k: int | None
) -> None:
    logits = torch.randn(200, 128, generator=torch.Generator().manual_seed(0)) * 3
    agreed = 0
    for seed, row_logits in enumerate(logits):
        probs = (row_logits / temperature).softmax(-1)
        node = TrieNode(0, None, logits=CachedLogits.from_logits(row_logits, top_k))
        if truncated:
            probs = torch.where(probs >= probs.topk(5).values[-1], probs, 0.0)
            node.distribution = CachedDistribution.from_probs(probs, "settings")
        sampler: Any = SimpleNamespace(rngs=[RowRNG(seed)])
        distributions: Any = SimpleNamespace(find_any_length=lambda node: node.distribution)
        drafted = DraftSampler(sampler, distributions, temperature)(0, node, 0)
        agreed += drafted == draw(probs[None], sampler.rngs).item()
    assert agreed == len(logits) if truncated or temperature < 1 else agreed > len(logits) / 4


@pytest.mark.parametrize(
    "settings", [{"do_sample": False, "temperature": None}, {"seed": None}, {"seed": 0}], ids=["greedy", "no", "own"]
)
def test_draft_tokens_are_sampled_only_with_an_rng_of_the_row(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    cache = LogitsCache()
    write(model, 1, logits_cache=cache, **settings)
    rates = (item for by_source in acceptance_rates.get(cache, {}).values() for item in by_source.items())
    proposed = {source for (_, source), rate in rates if rate.proposed != 4.0}
    assert (proposed > {ONLY_CACHED} or bool(proposed - {ONLY_CACHED})) == (settings.get("seed") is not None)


def test_nearly_all_sampled_drafts_are_accepted_where_equal_ngrams_have_equal_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    for name, parameter in model.named_parameters():
        if "o_proj" in name:  # without attention, logits depend on the last token alone
            parameter.data.zero_()
    hf_parallel.enable(model)
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")  # verification takes time per token, so that only likely tokens pay
    stats = {}
    for draft_tokens in (None, 0):
        settings = {"logits_cache": LogitsCache(), "logits_processor": None, "max_new_tokens": 60}
        calls = [write(model, 1, seed=seed, draft_tokens=draft_tokens, **settings).stats for seed in range(6)]
        stats[draft_tokens] = calls
    drafted = sum(of.drafted_tokens for of in stats[None])
    assert sum(of.accepted_tokens for of in stats[None]) > 0.8 * drafted > 0
    passes, passes_without = (sum(of.forward_passes for of in stats[key]) for key in (None, 0))
    assert passes < 0.7 * passes_without
