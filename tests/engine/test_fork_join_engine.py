"""fork_join in an engine: random dialects, budgets and cancellations."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from engine_requests import TOKENIZER, assert_nothing_is_held, random_case, random_prefixes, submit_all
from test_engine import enabled, peak_bytes

from hf_parallel.engine import Engine, RequestCancelledError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.slow
def test_requests_of_random_dialects_get_their_tokens_within_a_budget() -> None:
    rng, model = random.Random(3), enabled("llama")
    prefixes = random_prefixes(rng, 4, 40)
    cases = [random_case(rng, prefixes, ("fork_join",)) for _ in range(40)]
    budget = peak_bytes(model, cases[:14]) * 3 // 10
    outputs: list[Any] = [None] * len(cases)
    with Engine(model, TOKENIZER, max_kv_bytes=budget, max_batch_tokens=64) as engine:
        for index, handle in enumerate(submit_all(engine, cases, rng)):
            if handle is not None:
                with suppress(RequestCancelledError):
                    outputs[index] = handle.result(600)
        stats = engine.stats
        assert_nothing_is_held(engine)
    compared = [(case, output) for case, output in zip(cases, outputs, strict=True) if output is not None]
    assert len(compared) > len(cases) // 2
    assert stats.evicted_tokens
    assert sum(len(output.forks[0]) for _, output in compared) > len(compared) // 2
    for case, output in compared:
        assert output.sequences.tolist() == case.alone(model)
