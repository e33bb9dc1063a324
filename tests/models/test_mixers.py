"""Mixers, the modules that keep a state, are found by probing and called over states of their rows."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import DynamicCache

from hf_parallel.models.intercept.mixers import Mixer, MixerStates, mixers_wrapped
from hf_parallel.models.probing.mixers import find_mixers
from hf_parallel.models.probing.signature import cache_argument


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "falcon_h1", "mamba2"])
def test_a_mixer_continues_from_the_state_it_left(name):
    model = tiny.build(name)
    mixers = find_mixers(model)
    states = {mixer: MixerStates() for mixer in mixers}

    def call(mixer: Mixer, module, args, kwargs):
        states[mixer] = MixerStates(states[mixer].conv, states[mixer].recurrent)
        return module._call_impl(*args, **{**kwargs, mixer.argument: states[mixer]})

    ids = torch.randint(3, tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache, logits = DynamicCache(config=model.config), []
        with mixers_wrapped(model, mixers, call):
            argument = cache_argument(model)
            for part in ids.split([2, 5, 1, 1], dim=1):
                logits.append(model(part, use_cache=True, **{argument: cache}).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-3, rtol=1e-3)
