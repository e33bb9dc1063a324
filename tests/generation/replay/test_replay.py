"""Replay of cached logits: tokens that a policy keeps, concurrent use of the cache, freed memory."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from transformers import PreTrainedModel

from hf_parallel import Hotspot, LogitsCache

NEW = 12
PROMPT = tiny.make_prompts([16], seed=8)[0][None]
NO_HOTSPOTS = Hotspot(threshold=1e9)
"""Keeps all cached tokens."""


def sample(model: PreTrainedModel, cache: LogitsCache | None, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "seed": 0, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "logits_cache": cache}
    return model.generate(PROMPT, generation_mode="shared_prefix", **(given | settings))  # type: ignore[operator]


# Kept tokens


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_cached_token_that_the_settings_exclude_is_sampled_anew(model: PreTrainedModel, do_sample: bool) -> None:
    cache = LogitsCache()
    first = sample(model, cache).sequences[0, PROMPT.shape[1] :].tolist()
    again = sample(model, cache, replay=NO_HOTSPOTS, suppress_tokens=[first[4]], do_sample=do_sample, seed=1)
    tokens = again.sequences[0, PROMPT.shape[1] :].tolist()
    assert tokens[:4] == first[:4]
    assert first[4] not in tokens
    assert again.stats.replayed_tokens >= 5
