"""Several threads, one model: a call of a mode holds the model, and leaves it unchanged."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from hf_parallel import HogwildConfig
from hf_parallel.cache import BlockCache
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
        self.barrier.wait(20)
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
            assert failed.wait(20)  # the call that holds the model does not end before the other one raises

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


def test_plain_generate_that_began_earlier_stays_plain(model: Any) -> None:
    """A mode claims the model in another thread after plain `generate` has begun."""
    expected = generate(model, PROMPTS[0])
    began, claimed = threading.Event(), threading.Event()

    class Streamer:
        def put(self, value: torch.Tensor) -> None:  # first called with the prompt, before decoding
            began.set()
            assert claimed.wait(20)

        def end(self) -> None:
            pass

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, model, PROMPTS[0], streamer=Streamer())
        assert began.wait(20)
        with model.claimed(HogwildConfig()):
            claimed.set()
            assert torch.equal(future.result(), expected)


def test_block_attention_cannot_be_enabled_twice(model: Any) -> None:
    with block_attention_enabled(model, BlockCache()):
        with pytest.raises(RuntimeError, match="already"), block_attention_enabled(model, BlockCache()):
            pass
        assert model.config._attn_implementation == IMPLEMENTATION
    assert model.config._attn_implementation == "sdpa"
