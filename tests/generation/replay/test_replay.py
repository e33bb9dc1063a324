"""Replay of cached logits: tokens that a policy keeps, concurrent use of the cache, freed memory."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel import Hotspot, LogitsCache

NEW = 12
PROMPT = tiny.make_prompts([16], seed=8)[0][None]
NO_HOTSPOTS = Hotspot(threshold=1e9)
"""Keeps all cached tokens."""


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def sample(model: PreTrainedModel, cache: LogitsCache | None, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "seed": 0, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "logits_cache": cache}
    return model.generate(PROMPT, generation_mode="shared_prefix", **(given | settings))  # type: ignore[operator]


def run_threads(*functions: Any) -> None:
    """Run each function in its own thread and raise the first error."""
    errors: list[BaseException] = []

    def guarded(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


# Kept tokens


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_cached_token_that_the_settings_exclude_is_sampled_anew(model: PreTrainedModel, do_sample: bool) -> None:
    cache = LogitsCache()
    first = sample(model, cache).sequences[0, PROMPT.shape[1] :].tolist()
    again = sample(model, cache, replay=NO_HOTSPOTS, suppress_tokens=[first[4]], do_sample=do_sample, seed=1)
    tokens = again.sequences[0, PROMPT.shape[1] :].tolist()
    assert tokens[:4] == first[:4]
    assert first[4] not in tokens
    assert again.stats.replayed_tokens >= 5


# Threads


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("replay", ["hotspot", pytest.param("stepwise", marks=pytest.mark.slow)])
def test_calls_stay_exact_while_another_thread_clears_saves_and_loads_the_cache(
    model: PreTrainedModel, tmp_path: Path, replay: str
) -> None:
    plain = [sample(model, None, seed=seed).sequences for seed in range(4)]
    cache, replayed, done = LogitsCache(60_000), [0], [threading.Event(), threading.Event()]

    def generate(number: int) -> None:
        twin = hf_parallel.enable(copy.deepcopy(model))
        try:
            for seed in range(8):
                out = sample(twin, cache, seed=seed % 4, replay=replay, prefetch=bool(seed % 2))
                replayed.append(out.stats.replayed_tokens)
                assert replay == "hotspot" or torch.equal(out.sequences, plain[seed % 4])
        finally:
            done[number].set()

    def disturb() -> None:
        for count in itertools.count():
            if all(event.wait(0.02) for event in done):
                return
            cache.save(tmp_path / "cache")
            assert LogitsCache.load(tmp_path / "cache").num_bytes <= cache.max_bytes + 10_000
            if count % 4 == 3:  # rarely, so that replays occur on a slow machine, too
                cache.clear()

    run_threads(lambda: generate(0), lambda: generate(1), disturb)
    assert sum(replayed) > 0
    assert cache.num_bytes == sum(node.num_bytes for _, node in cache.nodes() if node.parent is not None)
    assert all(node.pins == 0 for _, node in cache.nodes())
