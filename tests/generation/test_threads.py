"""Several threads, one model: a call of a mode holds the model, and leaves it unchanged."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, ItemsView, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from hf_parallel.cache import BlockCache
from hf_parallel.engine import Engine
from hf_parallel.generation.claim import Claim
from hf_parallel.models.attention import IMPLEMENTATION, block_attention_enabled

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [prompt[None] for prompt in tiny.make_prompts([30, 20], seed=2)]


@pytest.fixture
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def generate(model: Any, prompt: torch.Tensor, **settings: Any) -> torch.Tensor:
    return model.generate(prompt, **({"max_new_tokens": 8, "do_sample": False} | settings))


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call in its own thread. Return their results or errors."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


class WaitingSettings(Mapping[str, Any]):
    """Empty settings. Reading them waits until all threads do."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)

    def items(self) -> ItemsView[str, Any]:
        self.barrier.wait(600)
        return {}.items()

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_of_two_calls_that_start_together_one_raises(model: Any) -> None:
    """Both pass the first check that the model is free before either of them claims it."""
    expected = [generate(model, prompt) for prompt in PROMPTS]
    mode = {"generation_mode": "shared_prefix", "parallel_config": WaitingSettings(2)}
    failed = threading.Event()

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            assert failed.wait(600)  # the call that holds the model does not end before the other one raises

        def fail(self, error: BaseException) -> None:
            failed.set()

        def end(self) -> None:
            pass

    outcomes = in_threads(*(lambda p=prompt: generate(model, p, streamer=Streamer(), **mode) for prompt in PROMPTS))
    (error,) = (outcome for outcome in outcomes if isinstance(outcome, RuntimeError))
    assert "already generating in parallel" in str(error)
    for outcome, tokens in zip(outcomes, expected, strict=True):
        assert outcome is error or torch.equal(outcome, tokens)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, PROMPTS[0]), expected[0])


def test_calls_of_a_model_that_waits_follow_each_other(model: Any) -> None:
    hf_parallel.enable(model, wait=True)
    hf_parallel.enable(model)  # leaves it unchanged
    expected = [generate(model, prompt) for prompt in PROMPTS]
    mode = {"generation_mode": "shared_prefix"}
    calls = [lambda p=prompt: [generate(model, p, **mode) for _ in range(10)] for prompt in PROMPTS * 2]
    for outcome, tokens in zip(in_threads(*calls), expected * 2, strict=True):
        assert isinstance(outcome, list), outcome
        assert all(torch.equal(one, tokens) for one in outcome)

    def again(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match="already generating"):  # it would wait for itself
            generate(model, PROMPTS[0], **mode)
        return scores

    assert torch.equal(generate(model, PROMPTS[0], logits_processor=[again], **mode), expected[0])


@pytest.mark.parametrize("wait", [0.2, 1])
def test_calls_that_wait_for_each_other_raise_after_the_given_seconds(model: Any, wait: float) -> None:
    """Each of two threads holds a model, and starts a mode on the other one."""
    models = [hf_parallel.enable(model, wait=wait), hf_parallel.enable(copy.deepcopy(model))]
    expected, both_hold = generate(model, PROMPTS[1]), threading.Barrier(2)

    def crossed(mine: Any, other: Any) -> Any:
        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            both_hold.wait(600)
            generate(other, PROMPTS[1], generation_mode="shared_prefix")
            return scores

        return generate(mine, PROMPTS[0], generation_mode="shared_prefix", logits_processor=[process], max_new_tokens=1)

    outcomes = in_threads(lambda: crossed(*models), lambda: crossed(*models[::-1]))
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert errors
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert f"still generating in another thread after wait={float(wait)} seconds" in str(error)
    for one in models:
        assert torch.equal(generate(one, PROMPTS[1], generation_mode="shared_prefix"), expected)


@pytest.mark.parametrize("wait", ["yes", -1, float("nan"), [1]])
def test_a_wait_that_is_no_number_of_seconds_raises(model: Any, wait: Any) -> None:
    with pytest.raises(ValueError, match=r"wait must be True, False or a number of seconds of at least 0, got "):
        hf_parallel.enable(model, wait=wait)


def test_plain_generate_that_began_earlier_stays_plain(model: Any) -> None:
    """A mode claims the model in another thread after plain `generate` has begun."""
    expected = generate(model, PROMPTS[0])
    began, claimed = threading.Event(), threading.Event()

    class Streamer:
        def put(self, value: torch.Tensor) -> None:  # first called with the prompt, before decoding
            began.set()
            assert claimed.wait(600)

        def end(self) -> None:
            pass

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, model, PROMPTS[0], streamer=Streamer())
        assert began.wait(600)
        with model.claimed(Claim()):
            claimed.set()
            assert torch.equal(future.result(), expected)


def test_plain_calls_beside_modes_are_those_of_the_model_alone(model: Any) -> None:
    """Modes begin and end at any time during forward passes and calls of `generate` in other threads."""
    ids, mask = tiny.left_pad([prompt[0] for prompt in PROMPTS])
    ended = threading.Event()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).logits

    expected, texts = forward(), generate(model, ids, attention_mask=mask)

    def forwards() -> list[bool]:
        equal = []
        while not ended.is_set():
            equal.append(torch.equal(forward(), expected))
        return equal

    def calls() -> list[bool]:
        equal = []
        while not ended.is_set():
            equal.append(torch.equal(generate(model, ids, attention_mask=mask), texts))
        return equal

    def modes() -> list[bool]:
        settings = {"generation_mode": "shared_prefix", "max_new_tokens": 2, "attention_mask": mask}
        try:
            return [torch.equal(generate(model, ids, **settings), texts[:, : ids.shape[1] + 2]) for _ in range(60)]
        finally:
            ended.set()

    for outcome in in_threads(forwards, calls, modes):
        assert isinstance(outcome, list), outcome
        assert all(outcome)
        assert len(outcome) > 3
    assert type(model.config) is type(tiny.build("llama").config)


def test_a_processor_may_run_the_model_itself(model: Any) -> None:
    """A forward pass in the thread of a mode, between its own passes, is a plain one."""
    with torch.no_grad():
        expected = model(PROMPTS[1]).logits

    def check(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert torch.equal(model(PROMPTS[1]).logits, expected)
        assert model.config._attn_implementation == "sdpa"
        return scores

    plain = generate(model, PROMPTS[0])
    assert torch.equal(generate(model, PROMPTS[0], generation_mode="shared_prefix", logits_processor=[check]), plain)


class PromptStreamer:
    """Calls a function when it receives the prompt, which is before the call begins."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.calls = [call]

    def put(self, value: torch.Tensor) -> None:
        if self.calls:
            self.calls.pop()()

    def end(self) -> None:
        pass


def test_a_streamer_may_run_other_models_while_its_call_is_prepared(model: Any) -> None:
    """Three models, nested: each call continues after those that its streamer started. A model in use raises."""
    models = [model, *(hf_parallel.enable(copy.deepcopy(model)) for _ in range(2))]
    expected = generate(model, PROMPTS[0])
    outcomes = []

    def nest(depth: int) -> None:
        for busy in models[:depth]:
            for mode in (None, "shared_prefix"):
                with pytest.raises(RuntimeError, match="already generating"):
                    generate(busy, PROMPTS[1], generation_mode=mode)
        for unused in models[depth:]:
            assert torch.equal(generate(unused, PROMPTS[0]), expected)
        if depth < len(models):
            streamer = PromptStreamer(lambda: nest(depth + 1))
            outcomes.append(generate(models[depth], PROMPTS[0], generation_mode="shared_prefix", streamer=streamer))

    nest(0)
    assert len(outcomes) == len(models)
    assert all(torch.equal(outcome, expected) for outcome in outcomes)


def test_a_streamer_may_submit_to_an_engine_while_its_request_is_prepared(model: Any) -> None:
    expected, inner = [generate(model, prompt) for prompt in PROMPTS], []
    settings = {"max_new_tokens": 8, "do_sample": False}
    with Engine(model) as engine:
        streamer = PromptStreamer(lambda: inner.append(engine.submit(PROMPTS[1], **settings)))
        outer = engine.submit(PROMPTS[0], streamer=streamer, **settings)
        for handle, tokens in zip([outer, *inner], expected, strict=True):
            assert torch.equal(handle.result(20).sequences, tokens)


def test_a_config_that_is_copied_during_a_pass_is_a_plain_one(model: Any) -> None:
    plain = type(model.config)
    with block_attention_enabled(model, BlockCache()):
        for twin in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
            assert type(twin) is plain
            assert twin.to_dict() == model.config.to_dict()
    assert type(copy.deepcopy(model).config) is plain


def test_an_ended_call_keeps_no_cache_alive(model: Any) -> None:
    cache = hf_parallel.LogitsCache()
    generate(model, PROMPTS[0], generation_mode="shared_prefix", logits_cache=cache)
    freed = weakref.ref(cache)
    del cache
    gc.collect()
    assert freed() is None


def test_block_attention_is_that_of_its_thread(model: Any) -> None:
    with block_attention_enabled(model, BlockCache()):
        assert model.config._attn_implementation == IMPLEMENTATION
        assert in_threads(lambda: model.config._attn_implementation) == ["sdpa"]
    assert model.config._attn_implementation == "sdpa"


def test_clones_that_share_the_weights_serve_threads_at_the_same_time(model: Any) -> None:
    """As in docs/other_tools.md."""
    ids = torch.stack(tiny.make_prompts([9]))

    def sample(model: Any, seed: int) -> list[list[int]]:
        settings = {"num_return_sequences": 4, "do_sample": True, "seed": seed, "max_new_tokens": 16}
        return model.generate(ids, generation_mode="shared_prefix", **settings).tolist()

    clones = []
    for _ in range(4):
        memo = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
        clones.append(copy.deepcopy(model, memo))
        assert all(a is b for a, b in zip(clones[-1].parameters(), model.parameters(), strict=True))
    expected = [sample(model, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(sample, clones, range(4))) == expected


def test_threads_may_enable_one_model_at_the_same_time() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    with ThreadPoolExecutor(8) as pool:
        assert all(enabled is model for enabled in pool.map(lambda _: hf_parallel.enable(model), range(16)))
    assert hf_parallel.is_enabled(model)


def test_a_process_that_is_forked_during_a_call_can_generate() -> None:
    model, claim = hf_parallel.enable(copy.deepcopy(tiny.build("llama"))), Claim()
    ids = tiny.make_prompts([5])[0][None]
    expected = model.generate(ids, max_new_tokens=3, generation_mode="shared_prefix")  # type: ignore[operator]
    try:
        with model.claimed(claim):  # type: ignore[operator]
            if not (child := os.fork()):
                found = model.generate(ids, max_new_tokens=3, generation_mode="shared_prefix")  # type: ignore[operator]
                os._exit(0 if torch.equal(found, expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        claim.active = False
