"""Requests of an engine as rollouts: their settings, what they have sampled, and what waits for them as they end."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from transformers import GenerationConfig

from hf_parallel.generation.modes import PLAIN_MODE
from hf_parallel.generation.outputs import ParallelOutput

T = TypeVar("T")
ONE_SAMPLED_ROW = {"do_sample": True, "num_beams": 1, "num_return_sequences": 1}
"""Settings of a request that is a rollout."""


def rollout_settings(settings: Mapping[str, Any], **decided: str) -> dict[str, Any]:
    """Return settings of `Engine.submit` for requests that sample one row each.

    `decided` are settings that cannot be given, each with what decides it. Raises `ValueError` for these, for another
    generation mode, and for settings that do not sample, or sample several rows.
    """
    for name, reason in decided.items():
        if name in settings:
            raise ValueError(f"{name} cannot be given: {reason}; got {settings[name]!r}")
    mode = settings.get("generation_mode", PLAIN_MODE)
    if mode != PLAIN_MODE:
        raise ValueError(f"generation_mode must be {PLAIN_MODE!r} for rollouts, got {mode!r}")
    config = settings.get("generation_config")
    check_one_sampled_row({name: settings.get(name, getattr(config, name, None)) for name in ONE_SAMPLED_ROW})
    complete = {**settings, "generation_mode": PLAIN_MODE}
    if not isinstance(config, GenerationConfig):
        return complete | ONE_SAMPLED_ROW
    complete["generation_config"] = copy.copy(config)
    for name, value in ONE_SAMPLED_ROW.items():
        complete.pop(name, None)
        setattr(complete["generation_config"], name, value)
    return complete


def check_one_sampled_row(settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` for settings of `generate` that do not sample, or sample several rows."""
    for name, needed in ONE_SAMPLED_ROW.items():
        value = settings.get(name)
        if value is not None and value != needed:
            raise ValueError(f"{name} must be {needed!r} for rollouts, each of which is one sampled row; got {value!r}")


def check_no_seed(generation_config: GenerationConfig) -> None:
    """Raise `ValueError` for a seed among the `generation_kwargs` of a trainer."""
    seed = getattr(generation_config, "seed", None)
    if seed is not None:
        raise ValueError(f"seed in generation_kwargs must be None: the seed of GRPOConfig is used; got {seed!r}")


def as_they_end(waiting: dict[Future[Any], T]) -> Iterator[list[T]]:
    """Remove and yield the values of futures as these end, until none is left. More may be added meanwhile.

    Values are yielded together if their futures have ended by then.
    """
    while waiting:
        wait(waiting, return_when=FIRST_COMPLETED)
        yield [waiting.pop(future) for future in [*waiting] if future.done()]


def sampled_row(output: ParallelOutput) -> tuple[list[int], list[float]]:
    """Return the tokens of an output with one row, and their log-probabilities under the sampled distribution."""
    (end,) = output.record.lengths
    tokens = output.sequences[0, output.record.begin : end].tolist()
    _, log_probs = output.record.sampled_log_probs(processed=True)
    return tokens, log_probs.tolist()
