"""Rollouts while the weights change: without lag the bits of a synchronous loop; with one, its limit holds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import tiny
import torch
from transformers import GenerationConfig

import hf_parallel
from hf_parallel.engine import Engine, QueueFullError
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.training import RolloutStream, tree_logprobs
from hf_parallel.training.requests import sampled_row
from hf_parallel.training.rollout_stream import Rollout

PROMPTS = [[5 + (3 * index + place) % 80 for place in range(3 + index % 4)] for index in range(64)]
SAMPLED = {
    "pad_token_id": tiny.PAD,
    "eos_token_id": [tiny.EOS, *range(60, 68)],
    "top_k": 0,
    "return_dict_in_generate": True,
}


def make_model() -> tuple[Any, torch.optim.Optimizer]:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(model: Any, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss with importance ratios, and the ratios."""
    log_probs = tree_logprobs(model, [r.prompt for r in rollouts], [r.tokens for r in rollouts])
    rewards = torch.tensor([float(len(set(r.tokens)) % 5) for r in rollouts])
    advantages = rewards - rewards.mean()
    ratios = []
    terms = []
    for rollout, of_rollout, advantage in zip(rollouts, log_probs, advantages, strict=True):
        ratio = (of_rollout - torch.tensor(rollout.log_probs)).exp()
        ratios.append(ratio.detach())
        terms.append(-advantage * ratio.clamp(max=2.0).sum())
    return torch.stack(terms).mean(), torch.cat(ratios)


def train(steps: int, take: Callable[[Any], list[Rollout]], update: Callable[[Any, Callable[[], Any]], None]) -> Any:
    """Train a model; return its weights, and all tokens."""
    model, optimizer = make_model()
    tokens = []
    for _ in range(steps):
        rollouts = take(model)
        tokens.append([rollout.tokens for rollout in rollouts])
        loss, ratios = loss_of(model, rollouts)
        assert (ratios == 1).all()
        optimizer.zero_grad()
        loss.backward()
        update(model, optimizer.step)
    return [parameter.detach().clone() for parameter in model.parameters()], tokens


@pytest.mark.parametrize("num_running", [4, 6])
def test_without_lag_a_stream_has_the_bits_of_a_synchronous_loop(num_running: int) -> None:
    """The loss is computed while the engine is open, and the weights change in it."""
    numbers = count()

    def sample(model: Any) -> list[Rollout]:
        found = []
        with Engine(model, max_rows=num_running) as engine:
            handles = []
            for index in (next(numbers) for _ in range(num_running)):
                settings = {"do_sample": True, "max_new_tokens": 24, "seed": mix(7, index), **SAMPLED}
                handles.append((index, engine.submit(PROMPTS[index], "shared_prefix", **settings)))
            for index, handle in handles:
                found.append(Rollout(index, PROMPTS[index], *sampled_row(handle.result()), handle.token_versions))
        return found

    expected, expected_tokens = train(3, sample, lambda model, step: step())
    streams: list[RolloutStream] = []

    def take(model: Any) -> list[Rollout]:
        if not streams:
            engine = Engine(model, max_rows=num_running)
            engine.__enter__()
            settings = {"max_new_tokens": 24, **SAMPLED}
            streams.append(RolloutStream(engine, PROMPTS, num_running=num_running, max_lag=0, seed=7, **settings))
        return streams[0].take(4)

    def update(model: Any, step: Callable[[], Any]) -> None:
        with streams[0].engine.updating_weights():
            step()

    found, tokens = train(3, take, update)
    streams[0].engine.close()
    assert tokens == expected_tokens
    for weights, other in zip(found, expected, strict=True):
        assert torch.equal(weights, other)


@pytest.mark.parametrize("max_lag", [1, 3])
def test_no_token_is_older_than_the_lag(max_lag: int) -> None:
    """Every prompt is used once, rollouts outlive updates, and ratios are 1 for tokens of the newest weights alone."""
    model, optimizer = make_model()
    used = []
    versions_of_rollouts = []
    with Engine(model) as engine:
        settings = {"max_new_tokens": 40, **SAMPLED}
        stream = RolloutStream(engine, PROMPTS, num_running=8, max_lag=max_lag, seed=1, **settings)
        while rollouts := stream.take(3):
            for rollout in rollouts:
                assert len(rollout.versions) == len(rollout.tokens) == len(rollout.log_probs)
                assert engine.weights_version - min(rollout.versions) <= max_lag
                versions_of_rollouts.append({*rollout.versions})
                used.append(rollout.index)
            optimizer.zero_grad()
            loss, ratios = loss_of(model, rollouts)
            is_new = torch.tensor([v == engine.weights_version for r in rollouts for v in r.versions])
            assert (ratios[is_new] == 1).all()
            loss.backward()
            with engine.updating_weights(running="recompute"):
                optimizer.step()
    assert sorted(used) == [*range(len(PROMPTS))]
    assert any(len(versions) > 1 for versions in versions_of_rollouts)
    assert engine.weights_version > len(PROMPTS) / 8


def test_an_error_of_a_rollout_leaves_the_others() -> None:
    """Each is raised once, and rollouts that have ended with it are returned by the next call."""
    model, _ = make_model()
    failing = (1, 3, 4)

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if any(input_ids[0, : len(PROMPTS[index])].tolist() == PROMPTS[index] for index in failing):
            raise KeyError("a processor")
        return scores

    used = []
    num_errors = 0
    with Engine(model) as engine:
        settings = {"max_new_tokens": 8, "logits_processor": [fail], **SAMPLED}
        stream = RolloutStream(engine, PROMPTS[:7], num_running=4, max_lag=0, **settings)
        while True:
            try:
                rollouts = stream.take(2)
            except KeyError:
                num_errors += 1
                continue
            if not rollouts:
                break
            used += [rollout.index for rollout in rollouts]
    assert sorted(used) == [0, 2, 5, 6]
    assert num_errors == len(failing)


def test_a_full_queue_loses_no_prompt() -> None:
    model, _ = make_model()
    used = []
    num_errors = 0
    with Engine(model, max_rows=1, max_waiting=2) as engine:
        stream = RolloutStream(engine, PROMPTS[:7], num_running=6, max_lag=0, max_new_tokens=8, **SAMPLED)
        while True:
            try:
                rollouts = stream.take(1)
            except QueueFullError:
                num_errors += 1
                time.sleep(0.01)
                continue
            if not rollouts:
                break
            used += [rollout.index for rollout in rollouts]
    assert num_errors > 0
    assert sorted(used) == [*range(7)]


def test_several_updates_between_two_calls_raise() -> None:
    """Rollouts could be older than the lag."""
    model, _ = make_model()
    with Engine(model) as engine:
        stream = RolloutStream(engine, PROMPTS, num_running=4, max_new_tokens=24, **SAMPLED)
        assert stream.take(1)
        for _ in range(2):
            with engine.updating_weights():
                pass
        with pytest.raises(RuntimeError, match="updated 2 times since the last take"):
            stream.take(1)
        with engine.updating_weights(), pytest.raises(RuntimeError, match="cannot wait for the engine"):
            stream.take(1)
        engine.close(drain=False)


SEVERAL_ROWS = {
    "do_sample must be True": {"do_sample": False},
    "num_beams must be 1": {"num_beams": 2},
    "num_return_sequences must be 1": {
        "generation_config": GenerationConfig(do_sample=True, num_return_sequences=2),
    },
    "generation_mode must be 'shared_prefix'": {"generation_mode": "hogwild"},
}


@pytest.mark.parametrize("message", SEVERAL_ROWS)
def test_a_rollout_is_one_sampled_row(message: str) -> None:
    settings = {"max_new_tokens": 2, "pad_token_id": tiny.PAD, **SEVERAL_ROWS[message]}
    model, _ = make_model()
    with Engine(model) as engine, pytest.raises(ValueError, match=message):
        RolloutStream(engine, PROMPTS, num_running=2, **settings)


def test_a_generation_config_is_completed() -> None:
    """Not changed: a rollout samples, whatever the defaults of the model are."""
    model, _ = make_model()
    model.generation_config.do_sample = False
    model.generation_config.num_return_sequences = 3
    config = GenerationConfig(max_new_tokens=4, pad_token_id=tiny.PAD)
    with Engine(model) as engine:
        stream = RolloutStream(engine, [PROMPTS[0]] * 4, num_running=4, max_lag=0, generation_config=config)
        rollouts = stream.take(4)
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 4
    assert config.do_sample is None


def test_invalid_numbers_of_rollouts_raise() -> None:
    model, _ = make_model()
    with Engine(model) as engine:
        with pytest.raises(ValueError, match="num_running must be an int of at least 1"):
            RolloutStream(engine, PROMPTS, num_running=0)
        with pytest.raises(ValueError, match="max_lag must be an int of at least 0"):
            RolloutStream(engine, PROMPTS, num_running=2, max_lag=-1)
        with pytest.raises(ValueError, match="count must be at most num_running=2, got 3"):
            RolloutStream(engine, PROMPTS, num_running=2).take(3)
        with pytest.raises(ValueError, match="prompts and completions must be 1-D"):
            RolloutStream(engine, PROMPTS[0], num_running=2).take(1)  # type: ignore[arg-type] # one prompt
