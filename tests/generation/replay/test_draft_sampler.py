"""DraftSampler: from cached logits it samples the token that the row samples from the same logits."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from test_drafts import ATTENTION_MASK, INPUT_IDS, TAILS, WIDTH, model, sample
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.generation.replay import drafts
from hf_parallel.generation.replay.drafts import DraftSampler
from hf_parallel.generation.rng import make_rngs

__all__ = ["model"]

pytestmark = pytest.mark.usefixtures("one_thread")


CASES: dict[str, dict[str, Any]] = {
    "all logits": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3, "min_new_tokens": 5},
    "high temperature": {"temperature": 1.5},
    "top_k at a high temperature": {"temperature": 1.5, "top_k": 5},
    "20 logits": {"top_k": 20},
}


@pytest.mark.parametrize("case", CASES)
def test_from_logits_of_the_model_it_samples_the_tokens_of_the_row(model: PreTrainedModel, case: str) -> None:
    settings = {"logits_processor": None, "temperature": 0.1, "eos_token_id": 5, "max_new_tokens": 24} | CASES[case]
    cache, equal = LogitsCache(top_k=20 if case == "20 logits" else None), []
    for seed in range(2):
        out = sample(model, logits_cache=cache, seed=seed, **settings)
        sampler: Any = SimpleNamespace(rngs=make_rngs(seed, len(TAILS)))
        distributions: Any = SimpleNamespace(find_any_length=lambda node: node.distribution)
        predict = DraftSampler(sampler, distributions, settings["temperature"])
        with cache.cursors() as cursors:
            for row, prompt in enumerate(INPUT_IDS):
                cursors.start(row, fingerprint(model), prompt[ATTENTION_MASK[row].bool()].tolist())
                for ahead, token in enumerate(out.sequences[row, WIDTH:].tolist()):
                    equal.append(predict(row, cursors.node(row), ahead) == token)
                    cursors.advance(row, token)
                    if token == settings["eos_token_id"]:
                        break
    assert len(equal) >= 2 * 24
    # At a high temperature, others than the 8 highest of 128 logits are sampled, too.
    assert sum(equal) > len(equal) / 4 if case == "high temperature" else all(equal)


def test_nearly_all_sampled_drafts_are_accepted_if_equal_ngrams_have_equal_logits(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_parallel.enable(copy.deepcopy(model))
    for name, parameter in model.named_parameters():
        if "o_proj" in name:  # without attention, logits depend on the last token alone
            parameter.data.zero_()

    def acceptance_and_passes() -> tuple[float, int]:
        settings = {"logits_cache": LogitsCache(), "logits_processor": None, "max_new_tokens": 60}
        stats = [sample(model, 1, seed=seed, **settings).stats for seed in range(6)]
        accepted = sum(each.accepted_tokens for each in stats)
        return accepted / sum(each.drafted_tokens for each in stats), sum(each.forward_passes for each in stats)

    acceptance, passes = acceptance_and_passes()
    monkeypatch.setattr(drafts, "MAX_SAMPLING_ROWS", 0)  # the cached tokens alone are drafted
    acceptance_of_cached, passes_with_cached = acceptance_and_passes()
    assert acceptance > 0.9 > 0.6 > acceptance_of_cached
    assert passes < 0.6 * passes_with_cached
