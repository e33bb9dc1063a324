"""DraftSampler: from cached logits it samples the token that the row samples from the same logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_drafts import ATTENTION_MASK, INPUT_IDS, TAILS, WIDTH, model, sample
from transformers import PreTrainedModel

from hf_parallel import LogitsCache
from hf_parallel.cache.fingerprint import fingerprint
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
