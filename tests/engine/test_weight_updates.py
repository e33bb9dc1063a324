"""Weights change between two passes of an engine: each token is sampled by the weights of its version."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from hf_parallel.engine import Engine, RequestHandle, WeightsChangedError
from hf_parallel.engine.updates import ON_UPDATE

SAMPLED = {"do_sample": True, "pad_token_id": tiny.PAD, "return_dict_in_generate": True}

BUDGETS = {"llama": 60_000, "deepseek_v2": 60_000, "qwen3_5_text": 150_000}
"""Bytes of keys, values and states that suffice for each request alone."""


def own_model(name: str = "llama") -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)))


def weights_of(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def move(model: Any, generator: torch.Generator) -> None:
    """Change all weights in place, as an optimizer does."""
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def log_probs_of_versions(model: Any, versions: Sequence[list[torch.Tensor]], ids: list[int]) -> torch.Tensor:
    """Return the log-probability of each token after the first by each version: `[versions, tokens - 1]`."""
    found = []
    for weights in versions:
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
        every = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        found.append(every.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.stack(found)


def wait_for(handle: RequestHandle, count: int) -> None:
    """Wait until a request has a number of tokens, or has ended."""
    handle._wait(lambda: handle.done or len(handle.sink.tokens) >= count)


def check_schedule(seed: int, name: str = "llama") -> int:
    """Interleave updates and requests at random. Return the number of tokens of versions after the first."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = own_model(name)
    versions = [weights_of(model)]
    kinds = ON_UPDATE if seed % 4 == 0 else ("recompute", "recompute", "drop")
    choices = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    prompts = [torch.randint(5, 90, (rng.randint(3, 40),), generator=generator) for _ in range(3)]
    handles: list[RequestHandle] = []
    budget = rng.choice([None, BUDGETS[name]])

    def submit(engine: Engine) -> None:
        for _ in range(rng.randint(1, 3)):
            prompt = rng.choice(prompts)
            settings = {"max_new_tokens": rng.randint(16, 48), "seed": len(handles), **SAMPLED}
            handles.append(engine.submit(prompt[: rng.randint(2, len(prompt))][None], **settings))

    with Engine(model, max_kv_bytes=budget, max_batch_tokens=rng.choice([16, 512])) as engine:
        for running in choices:
            submit(engine)
            wait_for(handles[-1], rng.randint(0, 8))
            with engine.updating_weights(running):
                move(model, generator)
                versions.append(weights_of(model))
        submit(engine)
        for handle in handles:
            if not handle._wait(lambda handle=handle: handle.done, 60):
                raise AssertionError("a request is stuck")
    assert engine.weights_version == len(choices)
    num_later = 0
    for handle in handles:
        marks = handle.token_versions
        assert len(marks) == len(handle.sink.tokens)
        assert marks == sorted(marks)
        if handle.error is not None:
            assert isinstance(handle.error, WeightsChangedError)
            assert "drop" in choices
            continue
        output = handle.result()
        begin, (end,) = output.record.begin, output.record.lengths
        expected = log_probs_of_versions(model, versions, output.sequences[0, :end].tolist())[:, begin - 1 :]
        _, log_probs = output.record.sampled_log_probs()
        if "finish" in choices:  # keys of several versions: only tokens before the first update can be computed again
            marks = marks[: marks.count(0)]
        of_version = expected[marks, torch.arange(len(marks))]
        found = torch.from_numpy(log_probs[: len(marks)]).float()
        torch.testing.assert_close(found, of_version, atol=2e-4, rtol=1e-4)
        num_later += sum(mark > 0 for mark in marks)
    return num_later


def test_each_token_has_the_version_of_the_weights_that_sampled_it() -> None:
    assert sum(check_schedule(seed) for seed in range(1, 9)) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("llama", 150), ("qwen3_5_text", 25), ("deepseek_v2", 25)])
def test_random_schedules_of_updates(name: str, count: int) -> None:
    assert sum(check_schedule(seed, name) for seed in range(100, 100 + count)) > count


def test_without_running_requests_an_update_is_another_engine() -> None:
    """No lag: the bits of one engine that is updated are those of an engine for each version."""
    model, other = own_model(), own_model()
    prompt = torch.arange(10, 30)[None]

    def sample(engine: Engine) -> tuple[list[list[int]], list[float]]:
        output = engine.submit(prompt, max_new_tokens=12, seed=3, **SAMPLED).result()
        return output.sequences.tolist(), output.record.sampled_log_probs()[1].tolist()

    found = []
    generator = torch.Generator().manual_seed(0)
    with Engine(model) as engine:
        for _ in range(3):
            found.append(sample(engine))
            with engine.updating_weights():
                move(model, generator)
    generator.manual_seed(0)
    for tokens, log_probs in found:
        with Engine(other) as engine:
            expected, expected_log_probs = sample(engine)
        assert tokens == expected
        assert log_probs == expected_log_probs
        move(other, generator)


def test_requests_finish_with_keys_that_later_ones_do_not_share() -> None:
    model = own_model()
    prompt = torch.arange(10, 50)[None]
    with Engine(model) as engine:
        old = engine.submit(prompt, max_new_tokens=60, seed=1, **SAMPLED)
        wait_for(old, 5)
        with engine.updating_weights("finish"):
            move(model, torch.Generator().manual_seed(1))
        new = engine.submit(prompt, max_new_tokens=8, seed=2, **SAMPLED)
        output = new.result()
        old.result()
        assert {*old.token_versions} == {0, 1}
        assert {*new.token_versions} == {1}
        assert new.stats.reused_tokens == 0
        again = engine.submit(prompt, max_new_tokens=8, seed=2, **SAMPLED)
        assert torch.equal(again.result().sequences, output.sequences)
        assert again.stats.reused_tokens > 0


def test_errors_leave_the_engine_as_it_was() -> None:
    model = own_model()
    engine = Engine(model)
    with pytest.raises(RuntimeError, match="not open"), engine.updating_weights():
        pass
    with engine:
        with pytest.raises(ValueError, match="running must be one of"), engine.updating_weights("keep"):  # type: ignore[arg-type]
            pass
        with pytest.raises(KeyError), engine.updating_weights():
            raise KeyError
        nested = pytest.raises(RuntimeError, match="by this thread already")
        with engine.updating_weights(), nested, engine.updating_weights():
            pass
        handle = engine.submit(torch.arange(10, 20)[None], max_new_tokens=4)
        for wait in (handle.result, lambda: list(handle), engine.close):
            with engine.updating_weights(), pytest.raises(RuntimeError, match="its body cannot wait for the engine"):
                wait()
        others = [threading.Thread(target=update, args=(engine,)) for _ in range(4)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join(60)
        assert engine.weights_version == 9
        assert handle.result() is not None
        assert engine.submit(torch.arange(10, 20)[None], max_new_tokens=4).result() is not None


def update(engine: Engine) -> None:
    with engine.updating_weights("finish"):
        pass
