"""Requests in an engine get the tokens that they get alone, whatever runs beside them, is evicted or preempted."""

from __future__ import annotations

import copy
import os
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine_requests import (
    MODES,
    STATE_MODES,
    TOKENIZER,
    Case,
    assert_nothing_is_held,
    nested_prompts,
    random_case,
    random_prefixes,
    submit_all,
)
from held_engine import first_step_held
from hybrids import SETTINGS as HYBRIDS
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel.cache.pool import Block, Pool
from hf_parallel.engine import Engine, KVBudgetError, RequestCancelledError
from hf_parallel.engine.request import Request
from hf_parallel.engine.scheduler import Scheduler
from hf_parallel.kernels import native, storage

pytestmark = pytest.mark.usefixtures("one_thread")

ARCHITECTURES = [("llama", 7)] + [
    pytest.param(name, 14, marks=pytest.mark.slow)
    for name in (
        *("llama", "gemma3_text", "gpt_neox", "gemma4_text-e2b", "llama4_text"),
        *("lfm2", "qwen3_5_text", "granitemoehybrid", "falcon_h1", "mamba2"),
    )
]
"""Models, each with a number of random requests."""


def enabled(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name, dtype=dtype)))


def peak_bytes(model: PreTrainedModel, cases: list[Case]) -> int:
    """Return the most bytes that an engine without budget holds for requests that are all there at its first step."""
    run_step = Engine._step
    peak = 0

    def measured(engine: Engine) -> None:
        nonlocal peak
        run_step(engine)
        peak = max(peak, engine.stats.kv_bytes + engine.stats.state_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_step", measured)
        with Engine(model, TOKENIZER) as engine:
            with first_step_held():
                handles = [engine.submit(case.prompt, case.mode, **case.arguments) for case in cases]
            for handle in handles:
                handle.result(600)
    return peak


@pytest.fixture
def exact_int8(monkeypatch: pytest.MonkeyPatch) -> str:
    """The `cache_dtype` "int8", with scaled numbers in double precision in place of 8 bits."""
    monkeypatch.setitem(storage._DTYPES, "int8", torch.float64)
    monkeypatch.setitem(storage._LARGEST, torch.float64, 1.0)
    monkeypatch.setattr(native, "supports", lambda *_: False)
    return "int8"


@pytest.mark.parametrize(("name", "count"), ARCHITECTURES)
def test_random_requests_get_their_tokens_within_a_budget(name: str, count: int) -> None:
    check_random_requests(name, count, None)


def check_random_requests(name: str, count: int, cache_dtype: str | None) -> None:
    rng, model = random.Random(name), enabled(name)
    prefixes = random_prefixes(rng, 4, 40)
    cases = [random_case(rng, prefixes, STATE_MODES if name in HYBRIDS else MODES) for _ in range(count)]
    budget = peak_bytes(model, cases) * 3 // 10
    with Engine(
        model, TOKENIZER, max_kv_bytes=budget, max_batch_tokens=64, state_interval=16, cache_dtype=cache_dtype
    ) as engine:
        outputs: list[Any] = [None] * len(cases)
        for index, handle in enumerate(submit_all(engine, cases, rng)):
            if handle is not None:
                with suppress(RequestCancelledError, KVBudgetError):  # workers may write more than a request reserves
                    outputs[index] = handle.result(600).sequences.tolist()
        stats = engine.stats
        assert_nothing_is_held(engine)
    for case, output in zip(cases, outputs, strict=True):
        assert output is None or output == case.alone(model)
    assert stats.evicted_tokens
    assert stats.finished > len(cases) // 4
    assert stats.reserved_bytes <= budget


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("lfm2", range(7, 10)),
        *[pytest.param(name, range(20), marks=pytest.mark.slow) for name in ("qwen3_5_text", "mamba2", "gemma3_text")],
    ],
)
def test_prompts_that_are_prefixes_of_each_other_get_their_tokens_at_once(name: str, seeds: range) -> None:
    """Also where layers keep states, so that the last token of a prompt is a node of its own."""
    model = enabled(name)
    for seed in seeds:
        prompts = nested_prompts(random.Random(seed), 8)
        with Engine(model) as engine:
            handles = [engine.submit(prompt, max_new_tokens=2) for prompt in prompts]
            outputs = [handle.result(600).sequences.tolist() for handle in handles]
            assert_nothing_is_held(engine)
        assert outputs == [model.generate(torch.tensor([prompt]), max_new_tokens=2).tolist() for prompt in prompts]


def test_random_requests_get_their_tokens_from_blocks_in_other_storage(
    exact_int8: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize, quantized_blocks = Pool.quantize, list[bool]()

    def count(pool: Pool, block: Block) -> bool:
        quantized_blocks.append(quantize(pool, block))
        return quantized_blocks[-1]

    monkeypatch.setattr(Pool, "quantize", count)
    check_random_requests("llama", 7, exact_int8)
    assert set(quantized_blocks) == {True, False}  # with and without memory for them


@pytest.mark.parametrize("mode", ["fork_join", *filter(None, MODES)])
def test_a_request_that_is_preempted_at_every_step_gets_the_probabilities_of_generate(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = enabled("llama", torch.float64), random.Random(3)
    case = random_case(rng, random_prefixes(rng, 2, 30), (mode,))
    case.settings["num_return_sequences"] = 1
    run_step = Engine._step

    def preempt_all(engine: Engine) -> None:
        for request in list(engine._scheduler.running):
            if request.has_started and not request.preempted and request.needs_pass:
                engine._scheduler.preempt(request)
        for _ in range(40):  # its keys and values are computed again, then one pass
            before = sum(request.num_tokens for request in engine._scheduler.running)
            run_step(engine)
            if not engine._scheduler.is_busy or sum(r.num_tokens for r in engine._scheduler.running) != before:
                return

    more = {"tokenizer": TOKENIZER, "generation_mode": mode, "return_dict_in_generate": True}
    expected: Any = model.generate(case.prompt, **more, **case.arguments)
    monkeypatch.setattr(Engine, "_step", preempt_all)
    with Engine(model, TOKENIZER) as engine:
        output = engine.submit(case.prompt, mode, **case.arguments).result(600)
        assert engine.stats.preemptions > 4
        assert_nothing_is_held(engine)
    assert output.sequences.tolist() == expected.sequences.tolist()
    np.testing.assert_allclose(output.record.sampled_log_probs(), expected.record.sampled_log_probs(), atol=1e-6)


def test_texts_of_a_request_that_is_preempted_before_its_first_token_are_streamed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rng = enabled("llama"), random.Random(3)
    prefixes = random_prefixes(rng, 2, 30)
    case = next(case for case in iter(lambda: random_case(rng, prefixes), None) if case.mode == "hogwild")
    with Engine(model, TOKENIZER) as engine:
        handle = engine.submit(case.prompt, "hogwild", **case.arguments)
        expected, record = handle.result(600), list(handle.texts())
    next_batch, preempted = Scheduler.next_batch, []

    def preempt_first(scheduler: Scheduler) -> list[Request]:
        for request in list(scheduler.running):
            if not request.num_tokens and request.pending is not None and len(preempted) < 2:
                preempted.append(request)
                scheduler.preempt(request)
        return next_batch(scheduler)

    monkeypatch.setattr(Scheduler, "next_batch", preempt_first)
    with Engine(model, TOKENIZER) as engine:
        handle = engine.submit(case.prompt, "hogwild", **case.arguments)
        output = handle.result(600)
        assert list(handle.texts()) == record
        assert_nothing_is_held(engine)
    assert len(preempted) == 2
    assert output.record.events == expected.record.events
    assert output.sequences.tolist() == expected.sequences.tolist()


def test_prefixes_of_earlier_and_of_running_requests_are_computed_once() -> None:
    model, rng = enabled("llama"), random.Random(5)
    (prefix,) = random_prefixes(rng, 1, 60)
    prompts = [torch.cat((prefix, torch.tensor([40 + i, 50])))[None] for i in range(6)]
    with Engine(model, TOKENIZER) as engine:
        handles = [engine.submit(prompt, max_new_tokens=8) for prompt in prompts]
        outputs = [handle.result(600).sequences.tolist() for handle in handles]
        stats = engine.stats
        assert engine.submit(prompts[0], max_new_tokens=8).result(600).sequences.tolist() == outputs[0]
        assert engine.stats.kv_bytes == stats.kv_bytes  # equal completions are kept once
        assert stats.prefilled_tokens == 60 + 2 * len(prompts)
        assert stats.reused_tokens == 60 * (len(prompts) - 1)
        longer = torch.tensor([outputs[0][0] + [33, 34]])  # the conversation goes on
        prefilled = engine.stats.prefilled_tokens
        engine.submit(longer, max_new_tokens=4).result(600)
        assert engine.stats.prefilled_tokens - prefilled == 3  # the last token of an answer has no keys yet
    assert outputs == [model.generate(prompt, max_new_tokens=8).tolist() for prompt in prompts]


def test_requests_share_prefixes_with_those_of_their_salt_only() -> None:
    model, rng = enabled("llama"), random.Random(0)
    prompts = [
        torch.cat((prefix[: rng.randint(1, 30)], torch.randint(32, 126, (5,))))
        for prefix in random_prefixes(rng, 8, 30)[:2] * 6
    ]
    seen: dict[str | None, list[list[int]]] = {None: [], "": [], "a": [], "b": []}
    with Engine(model, TOKENIZER) as engine:
        for _ in range(30):
            prompt, salt = rng.choice(prompts).tolist(), rng.choice(list(seen))
            output = engine.submit(prompt, max_new_tokens=4, cache_salt=salt).result(600)
            shared = [len(os.path.commonprefix([prompt[:-1], other[:-1]])) for other in seen[salt]]
            assert min(output.stats.reused_tokens, len(prompt) - 1) == max(shared, default=0)
            seen[salt].append(output.sequences[0].tolist())
        assert_nothing_is_held(engine)
        with pytest.raises(ValueError, match="cache_salt must be a string or None, got 5"):
            engine.submit(prompts[0], cache_salt=5)
