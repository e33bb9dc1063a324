"""Requests whose format begins after a thinking, in an engine that preempts them, and replayed from cached logits."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import tiny
import torch
from engine_requests import TOKENIZER, Case, assert_nothing_is_held, random_prefixes
from test_after import random_call
from test_engine import enabled, peak_bytes

from hf_parallel import LogitsCache
from hf_parallel.engine import Engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]


def thinking_case(rng: random.Random, prefixes: list[torch.Tensor]) -> Case:
    """Return a request of `pdos` or `fork_join` whose thinking soon ends, by the model or by its limit."""
    settings = random_call(rng) | {"max_new_tokens": 90, "pad_token_id": tiny.PAD}
    mode = settings.pop("generation_mode")
    if rng.random() < 0.5:
        settings |= {"after": "%", "thinking_max_new_tokens": rng.randint(1, 20)}
    else:
        settings["after"] = re.compile(r"(?s).{4}.*?[0-9a-z]")
    if rng.random() < 0.5:
        settings |= {"do_sample": True, "seed": rng.randrange(1000), "top_k": 4}
    prefix = rng.choice(prefixes)
    return Case(prefix[None, : rng.randint(1, len(prefix))], mode, settings)


def test_requests_within_a_budget_get_the_tokens_that_they_get_alone() -> None:
    rng, model = random.Random(5), enabled("llama")
    prefixes = random_prefixes(rng, 3, 40)
    cases = [thinking_case(rng, prefixes) for _ in range(12)]
    budget = peak_bytes(model, cases) * 4 // 10
    with Engine(model, TOKENIZER, max_kv_bytes=budget, max_batch_tokens=64) as engine:
        handles = [engine.submit(case.prompt, generation_mode=case.mode, **case.arguments) for case in cases]
        outputs = [handle.result(600) for handle in handles]
        stats = engine.stats
        assert_nothing_is_held(engine)
    assert stats.evicted_tokens
    assert sum(0 < output.thinking_tokens[0] < 90 for output in outputs) > len(cases) // 2
    for case, output in zip(cases, outputs, strict=True):
        alone = case.output_alone(model)
        assert output.sequences.tolist() == alone.sequences.tolist()
        assert output.thinking == alone.thinking
        assert output.thinking_tokens == alone.thinking_tokens


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_the_thinking_is_replayed_from_cached_logits(name: str) -> None:
    rng, model = random.Random(6), enabled(name)
    prefixes = random_prefixes(rng, 2, 20)
    replayed = 0
    for _ in range(4):
        case = thinking_case(rng, prefixes)
        while name != "llama" and (
            case.settings.get("join") == "rotate" or case.settings.get("dialect") not in (None, "pdos")
        ):
            case = thinking_case(rng, prefixes)
        plain = case.output_alone(model)
        case.settings["logits_cache"] = cache = LogitsCache()
        settings: dict[str, Any] = case.settings | {"logits_cache": cache, "generation_mode": case.mode}
        for _ in range(2):
            out = model.generate(case.prompt, tokenizer=TOKENIZER, return_dict_in_generate=True, **settings)
            assert out.sequences.tolist() == plain.sequences.tolist()
            assert out.thinking == plain.thinking
        replayed += out.stats.replayed_tokens
        assert out.stats.forward_passes == 0
    assert replayed
