"""One model, several threads: a call of a mode has the model to itself, and leaves it as it was."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
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
    """What calls in threads of their own return, or the errors that they raise."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def test_of_two_calls_that_start_together_one_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [generate(model, prompt) for prompt in PROMPTS]
    looked, take = threading.Barrier(2), type(model)._take_parallel_config

    def take_together(self: Any, kwargs: dict[str, Any]) -> Any:
        looked.wait(20)  # both have seen that the model is free
        return take(self, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_take_parallel_config", take_together)
        mode = {"generation_mode": "shared_prefix"}
        outcomes = in_threads(*(lambda p=prompt: generate(model, p, **mode) for prompt in PROMPTS))
    (refused,) = (outcome for outcome in outcomes if isinstance(outcome, RuntimeError))
    assert "generating in parallel already" in str(refused)
    for outcome, right in zip(outcomes, expected, strict=True):
        assert outcome is refused or torch.equal(outcome, right)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, PROMPTS[0]), expected[0])


def test_plain_generate_that_began_earlier_stays_plain(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked whether the model is free before a mode took it in another thread."""
    expected = generate(model, PROMPTS[0])
    with model.claimed(HogwildConfig()):
        monkeypatch.setattr(type(model), "_check_free", lambda self: None)
        (output,) = in_threads(lambda: generate(model, PROMPTS[0]))
    assert torch.equal(output, expected)


def test_block_attention_is_not_switched_on_twice(model: Any) -> None:
    with block_attention_enabled(model, BlockCache()):
        with pytest.raises(RuntimeError, match="set already"), block_attention_enabled(model, BlockCache()):
            pass
        assert model.config._attn_implementation == IMPLEMENTATION
    assert model.config._attn_implementation == "sdpa"
