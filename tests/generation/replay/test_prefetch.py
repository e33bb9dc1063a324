"""Prefetch: distributions of later replays are computed while the model decodes, and samples do not change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from hf_parallel import LogitsCache
from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.generation.sampling.processors import STAGES

NEW = 12
INPUT_IDS, ATTENTION_MASK = tiny.left_pad(tiny.make_prompts([24, 20, 11], seed=8))
CUT = {"top_p": 0.7}


@pytest.fixture
def not_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU like a GPU: the decoding thread stores no distributions."""
    monkeypatch.setattr("hf_parallel.generation.decoding.replay.distributions.HOST", ())


class Pause(BaseStreamer):
    """Waits after every token, as for the pass of a large model, and records background threads.

    Waits `until` a condition holds, but a limited time.
    """

    def __init__(self, until: Callable[[], bool] = lambda: True) -> None:
        self.until, self.seen, self.num_waits = until, set[int](), 100_000

    def put(self, value: torch.Tensor) -> None:
        self.seen |= {id(thread) for thread in workers()}
        time.sleep(0.003)
        while workers() and not self.until() and self.num_waits:
            self.num_waits -= 1
            time.sleep(0.003)

    def end(self) -> None:
        pass


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_parallel prefetch"]


def sample(model: PreTrainedModel, cache: LogitsCache | None, **settings: Any) -> torch.Tensor:
    defaults: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": NEW, "seed": 0, "top_k": 0}
    defaults |= {"attention_mask": ATTENTION_MASK, "pad_token_id": 0, "eos_token_id": 5}
    if cache is not None:
        defaults |= {"generation_mode": "resample", "logits_cache": cache}
    defaults.setdefault("generation_mode", "shared_prefix")
    return model.generate(**({"inputs": INPUT_IDS} | defaults | settings))  # type: ignore[operator]


def with_logits(cache: LogitsCache) -> list[TrieNode]:
    return [node for _, node in cache.nodes() if node.logits is not None]


def with_distribution(cache: LogitsCache) -> list[TrieNode]:
    return [node for node in with_logits(cache) if node.distribution is not None]


def count_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows whose distributions the decoding thread computes from now on."""
    counts: list[int] = []
    number, keep_top_p = STAGES[TopPLogitsWarper]

    def counting(scores: torch.Tensor, step: Any) -> torch.Tensor:
        if threading.current_thread() not in workers():
            counts.append(len(scores))
        return keep_top_p(scores, step)

    monkeypatch.setitem(STAGES, TopPLogitsWarper, (number, counting))
    return counts


# Distributions are computed once


@pytest.mark.usefixtures("not_host")
def test_a_replay_computes_no_distribution_that_was_prefetched(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LogitsCache()
    first = sample(
        model, cache, prefetch=True, streamer=Pause(lambda: with_distribution(cache) == with_logits(cache)), **CUT
    )
    assert with_distribution(cache) == with_logits(cache)
    computed = count_computed(monkeypatch)
    assert torch.equal(sample(model, cache, **CUT), first)
    assert computed == []


# Samples do not change


SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_k": 4, "min_new_tokens": NEW},
    {"min_p": 0.1, "seed": [3, 4, 5]},
    {"typical_p": 0.6},
    {"repetition_penalty": 1.3, "top_p": 0.8},
]


@pytest.mark.usefixtures("not_host")
@pytest.mark.parametrize("replay", ["stepwise", pytest.param("hotspot", marks=pytest.mark.slow)])
def test_samples_are_equal_with_and_without_prefetch(model: PreTrainedModel, replay: str) -> None:
    """Settings change from call to call, and return, on one cache."""
    prefetched, replayed = LogitsCache(), LogitsCache()
    for number in (*range(6), 6, 8):  # the last two have settings of earlier calls
        settings = {"seed": number // 6, "replay": replay} | SETTINGS[number % 6]
        pause = Pause(lambda: bool(with_distribution(prefetched)))
        ours = sample(model, prefetched, prefetch=True, streamer=pause, **settings)
        assert torch.equal(ours, sample(model, replayed, prefetch=False, **settings)), settings
        if replay == "stepwise":
            assert torch.equal(ours, sample(model, None, **settings)), settings
    assert with_distribution(prefetched)


class Custom(LogitsProcessor):
    """A processor of the caller."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (input_ids[:, -1:] % 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"typical_p": 0.6},
        {"logits_processor": LogitsProcessorList([Custom()])},
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": False},
    ],
    ids=["repetition_penalty", "typical_p", "custom", "scores", "greedy"],
)
def test_distributions_that_depend_on_more_than_logits_are_not_cached(
    model: PreTrainedModel, settings: dict[str, Any]
) -> None:
    cache = LogitsCache()
    for _ in range(2):
        sample(model, cache, prefetch=True, streamer=Pause(), **CUT, **settings)
    assert with_distribution(cache) == []


# Threads, errors, memory


@pytest.mark.usefixtures("not_host")
def test_prefetched_distributions_are_counted_and_stay_within_the_budget(model: PreTrainedModel) -> None:
    large = LogitsCache()
    sample(model, large, prefetch=True, streamer=Pause(lambda: bool(with_distribution(large))), **CUT)
    assert with_distribution(large)
    assert counted(large) == large.num_bytes
    small = LogitsCache(large.num_bytes // 2)
    for seed in range(4):
        sample(model, small, seed=seed, prefetch=True, streamer=Pause(), **CUT)
        assert counted(small) == small.num_bytes <= small.max_bytes
    assert with_distribution(small)


def counted(cache: LogitsCache) -> int:
    return sum(node.num_bytes for _, node in cache.nodes())
