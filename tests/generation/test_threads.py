"""Several threads, one model: a call of a mode holds the model, and leaves it unchanged."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from hf_parallel.generation.enabled import Claim

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


def test_plain_calls_beside_modes_are_those_of_the_model_alone(model: Any) -> None:
    """Modes begin and end at any time during forward passes and calls of `generate` in other threads.

    They go on until each of the others has run some times.
    """
    ids, mask = tiny.left_pad([prompt[0] for prompt in PROMPTS])
    ended = threading.Event()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).logits

    expected, texts = forward(), generate(model, ids, attention_mask=mask)

    of_forwards: list[bool] = []
    of_calls: list[bool] = []

    def forwards() -> list[bool]:
        while not ended.is_set():
            of_forwards.append(torch.equal(forward(), expected))
        return of_forwards

    def calls() -> list[bool]:
        while not ended.is_set():
            of_calls.append(torch.equal(generate(model, ids, attention_mask=mask), texts))
        return of_calls

    def modes() -> list[bool]:
        settings = {"generation_mode": "shared_prefix", "max_new_tokens": 2, "attention_mask": mask}
        equal: list[bool] = []
        try:
            while len(equal) < 25 or min(len(of_forwards), len(of_calls)) < 4:
                equal.append(torch.equal(generate(model, ids, **settings), texts[:, : ids.shape[1] + 2]))
        finally:
            ended.set()
        return equal

    for outcome in in_threads(forwards, calls, modes):
        assert isinstance(outcome, list), outcome
        assert all(outcome)
        assert len(outcome) > 3
    assert type(model.config) is type(tiny.build("llama").config)


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
