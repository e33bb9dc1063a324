"""Requests of an engine that share a logits cache: what one computes, the others replay, at the same time too."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import tiny
import torch
from engine_requests import assert_nothing_is_held

from hf_parallel import LogitsCache
from hf_parallel.engine import Engine, RequestCancelledError, RequestHandle

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 12
FIXED: dict[str, Any] = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "pad_token_id": 0, "draft_tokens": 0}


class Gate:
    """A streamer that stops the engine at the first token, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def put(self, value: torch.Tensor) -> None:
        """Wait, except for the prompt, which `submit` puts."""
        if threading.current_thread() is threading.main_thread():
            return
        self.reached.set()
        self.opened.wait(600)

    def end(self) -> None:
        """Do nothing."""


@contextmanager
def at_once(engine: Engine) -> Iterator[None]:
    """Admit the requests that are submitted in the body in one step."""
    gate = Gate()
    other = engine.submit(tiny.make_prompts([5], seed=9)[0][None], max_new_tokens=2, do_sample=False, streamer=gate)
    assert gate.reached.wait(600)
    yield
    gate.opened.set()
    other.result()


def resample(engine: Engine, prompt: torch.Tensor, cache: LogitsCache, **settings: Any) -> RequestHandle:
    """Submit a request."""
    return engine.submit(prompt[None], "resample", logits_cache=cache, **{**FIXED, **settings})


def test_equal_requests_of_one_moment_are_computed_once(model: Any) -> None:
    prompt, cache = tiny.make_prompts([20])[0], LogitsCache()
    with Engine(model) as engine:
        with at_once(engine):
            handles = [resample(engine, prompt, cache, do_sample=False) for _ in range(4)]
        sequences = [handle.result().sequences.tolist() for handle in handles]
        steps = engine.stats.steps
    assert sequences[1:] == sequences[:1] * 3
    assert [handle.stats.replayed_tokens for handle in handles] == [0, LENGTH, LENGTH, LENGTH]
    assert steps <= 2 + LENGTH  # no request waits for the end of another


def test_a_request_goes_on_alone_if_the_one_that_it_waits_for_is_canceled(model: Any) -> None:
    prompt, cache = tiny.make_prompts([20])[0], LogitsCache()
    with Engine(model) as engine:
        with at_once(engine):
            handles = [resample(engine, prompt, cache, do_sample=False, max_new_tokens=200) for _ in range(3)]
        next(iter(handles[0]))
        handles[0].cancel()
        with pytest.raises(RequestCancelledError):
            handles[0].result()
        assert handles[1].result().sequences.tolist() == handles[2].result().sequences.tolist()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_long_replay_leaves_turns_to_others_and_can_be_canceled(
    model: Any, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_parallel.engine.request.TURN_SECONDS", 0)
    prompt, cache = tiny.make_prompts([20])[0], LogitsCache()
    long: dict[str, Any] = {"do_sample": False, "max_new_tokens": 400, "min_new_tokens": 400}
    with Engine(model) as engine:
        expected = resample(engine, prompt, cache, **long).result().sequences.tolist()
        with at_once(engine):
            replay = resample(engine, prompt, cache, **long)
            other = engine.submit(tiny.make_prompts([7], seed=5)[0][None], do_sample=False, max_new_tokens=4)
        other.result()
        assert 0 < len(replay.sink.tokens) < 400, "the replay has not ended"
        if cancelled:
            replay.cancel()
            with pytest.raises(RequestCancelledError):
                replay.result()
        else:
            assert replay.result().sequences.tolist() == expected
            assert replay.stats.replayed_tokens == 400
        assert_nothing_is_held(engine)
    assert all(node.pins == 0 for _, node in cache.nodes())


def test_requests_of_another_salt_compute_for_themselves(model: Any) -> None:
    prompt, cache = tiny.make_prompts([20])[0], LogitsCache()
    with Engine(model) as engine:
        with at_once(engine):
            salts = [None, "a", "b", "a", None]
            handles = [resample(engine, prompt, cache, do_sample=False, cache_salt=salt) for salt in salts]
        sequences = [handle.result().sequences.tolist() for handle in handles]
    assert sequences == sequences[:1] * 5
    assert [handle.stats.replayed_tokens for handle in handles] == [0, 0, 0, LENGTH, LENGTH]


def test_random_requests_share_a_logits_cache_within_a_budget(model: Any, token_bytes: int) -> None:
    """Requests are canceled and preempted; the others get the tokens that they get alone."""
    rng = random.Random(0)
    prompts = [*tiny.make_prompts([30, 31, 32], seed=0)]
    prompts += [torch.cat((prompts[0], prompts[1][:4]))]
    cases = [
        (
            rng.choice(prompts),
            {
                "do_sample": rng.random() < 0.8,
                "top_k": 0,
                "temperature": rng.choice([0.05, 0.5]),
                "seed": rng.randrange(4),
                "max_new_tokens": rng.randint(LENGTH, 2 * LENGTH),
                "priority": rng.randrange(2),
            },
        )
        for _ in range(20)
    ]
    cache, handles = LogitsCache(), []
    with Engine(model, max_kv_bytes=90 * token_bytes, max_rows=6) as engine:
        for prompt, settings in cases:
            handles.append(resample(engine, prompt, cache, **settings))
            if rng.random() < 0.2:
                handles[rng.randrange(len(handles))].cancel()
        found = []
        for handle in handles:
            found.append(None)
            with suppress(RequestCancelledError):
                found[-1] = handle.result(timeout=600).sequences.tolist()
        assert_nothing_is_held(engine)
        assert engine.stats.evicted_tokens > 0
    for (prompt, settings), sequence in zip(cases, found, strict=True):
        if sequence is not None:
            given = {**FIXED, **settings, "attention_mask": torch.ones_like(prompt[None])}
            del given["priority"]
            alone = model.generate(prompt[None], generation_mode="resample", logits_cache=LogitsCache(), **given)
            assert sequence == alone.tolist()
    assert all(node.pins == 0 for _, node in cache.nodes())
    assert not cache.computing
