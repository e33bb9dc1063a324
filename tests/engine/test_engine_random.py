"""Random requests with faults at once: each ends, as it should, and with the tokens that it gets alone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import tiny
import torch
from engine_requests import MODES, STATE_MODES, TOKENIZER, WAIT, Case, run_with_faults
from hybrids import SETTINGS as HYBRIDS
from mode_cases import small_call

import hf_parallel
from hf_parallel.engine import Engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SAME_BITS = ("llama", "gemma3_text", "lfm2", "deepseek_v3")
ARCHITECTURES = ("llama", "gemma3_text", "lfm2", "qwen3_5_text", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "seeds", "count"),
    [
        ("llama", [0], 5),
        ("lfm2", [2], 5),
        *[pytest.param(name, range(10, 16), 10, marks=pytest.mark.slow) for name in ARCHITECTURES],
    ],
)
def test_random_requests_with_faults_end_with_their_tokens(name: str, seeds: list[int], count: int) -> None:
    same_bits = name in SAME_BITS
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)), batch_invariant=same_bits)
    for seed in seeds:
        rng, modes = random.Random(f"{name} {seed}"), STATE_MODES if name in HYBRIDS else MODES
        ends = run_with_faults(model, rng, count, modes, same_bits)
        assert ends["ended"]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_workers_have_the_same_bits_wherever_other_requests_divide_their_prompt(name: str) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)), batch_invariant=True)
    prompt = torch.arange(40, 56)[None]
    settings = small_call("hogwild") | {"max_new_tokens": 6, "redundancy_prompt": "Seen?"}
    case = Case(prompt, settings.pop("generation_mode"), settings)
    _, expected = case.output_alone(model).record.sampled_log_probs()
    for cut in (1, 7, 13):
        other = torch.cat((prompt[:, :cut], torch.tensor([[90, 91]])), dim=1)
        with Engine(model, TOKENIZER) as engine:
            beside = engine.submit(other, max_new_tokens=12)
            _, values = engine.submit(case.prompt, case.mode, **case.arguments).result(WAIT).record.sampled_log_probs()
            beside.result(WAIT)
        np.testing.assert_array_equal(values, expected, f"divided after {cut} tokens")
