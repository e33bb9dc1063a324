"""Replay with policies that keep tokens, and while other threads change the cache."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

import hf_parallel
from hf_parallel import Hotspot, LogitsCache
from hf_parallel.cache.logits_trie import CachedLogits, TrieNode
from hf_parallel.generation.resampling.replay import last_continuation

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 12
PROMPT = tiny.make_prompts([16], seed=8)[0][None]
NOTHING = Hotspot(threshold=1e9)
"""Draws nothing: all that was taken before stays."""


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def sample(model: PreTrainedModel, cache: LogitsCache | None, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "seed": 0, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "logits_cache": cache}
    return model.generate(PROMPT, generation_mode="shared_prefix", **(given | settings))  # type: ignore[operator]


def together(*works: Any) -> None:
    """Run functions in threads of their own; an error in one of them is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


# What a policy keeps


@pytest.mark.parametrize("do_sample", [True, False])
def test_no_token_is_kept_that_the_settings_of_the_call_rule_out(model: PreTrainedModel, do_sample: bool) -> None:
    cache = LogitsCache()
    first = sample(model, cache).sequences[0, PROMPT.shape[1] :].tolist()
    again = sample(model, cache, replay=NOTHING, suppress_tokens=[first[4]], do_sample=do_sample, seed=1)
    written = again.sequences[0, PROMPT.shape[1] :].tolist()
    assert written[:4] == first[:4]
    assert first[4] not in written
    assert again.stats.replayed_tokens >= 5


def test_a_minimum_of_tokens_holds_where_an_end_was_taken_before(model: PreTrainedModel) -> None:
    cache = LogitsCache()
    end = sample(model, cache).sequences[0, PROMPT.shape[1] + 3].item()
    ended = sample(model, cache, replay=NOTHING, eos_token_id=end)
    assert ended.sequences.shape[1] == PROMPT.shape[1] + 4
    longer = sample(model, cache, replay=NOTHING, eos_token_id=end, min_new_tokens=8)
    assert longer.sequences.shape[1] >= PROMPT.shape[1] + 8


def test_what_was_taken_under_the_same_settings_is_kept_without_weighing_it_again(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LogitsCache()
    settings: dict[str, Any] = {"eos_token_id": 5, "min_new_tokens": NEW, "temperature": 0.7}
    first = sample(model, cache, **settings)
    weighed: list[int] = []
    warp = TemperatureLogitsWarper.__call__

    def noting(self: TemperatureLogitsWarper, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weighed.extend(range(len(scores)))
        return warp(self, ids, scores)

    monkeypatch.setattr(TemperatureLogitsWarper, "__call__", noting)

    def weighings(**other: Any) -> int:
        weighed.clear()
        out = sample(model, cache, replay=NOTHING, seed=1, **(settings | other))
        assert torch.equal(out.sequences, first.sequences)
        assert out.stats.replayed_tokens == NEW
        return len(weighed)

    assert weighings() == 0
    assert weighings(temperature=0.8) == NEW, "other settings"
    assert weighings(temperature=0.8) == 0, "not any more"
    assert weighings(temperature=0.8, output_scores=True) == NEW, "the caller wants to see them"
    assert weighings(temperature=0.8, logits_processor=LogitsProcessorList([Unknown()])) == NEW


class Unknown(LogitsProcessor):
    """Nobody knows what it looks at."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_a_cache_that_nobody_has_any_more_frees_its_logits_at_once() -> None:
    cache = LogitsCache()
    with cache.cursors() as cursors:
        cursors.start(0, "model", [1])
        for token in range(3):
            cursors.store(0, torch.randn(8))
            cursors.advance(0, token)
    kept = [weakref.ref(state) for _, state in cache.nodes()]
    gc.disable()
    try:
        del cache, cursors
        assert [state() for state in kept] == [None] * 5
    finally:
        gc.enable()


# Other threads


@pytest.mark.usefixtures("hasty")
def test_a_route_is_found_while_others_add_continuations_and_drop_them() -> None:
    cache, done = LogitsCache(40_000), threading.Event()
    state = TrieNode(0, None)

    def add() -> None:
        try:
            for _ in range(30):
                with cache.cursors() as cursors:
                    for token in range(60):
                        cursors.start(0, "model", [1])
                        cursors.store(0, torch.randn(8))
                        cursors.advance(0, token)
                        cursors.store(0, torch.randn(8))
        finally:
            done.set()

    def follow() -> None:
        while not done.is_set():
            states, tokens, uncertainty = last_continuation(cache, state)
            assert len(states) == len(tokens) == len(uncertainty)

    with cache.cursors() as cursors:
        cursors.start("here", "model", [1])
        state = cursors.node("here")
        together(add, follow)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("replay", ["stepwise", "hotspot"])
def test_calls_go_on_while_others_clear_save_and_load(model: PreTrainedModel, tmp_path: Path, replay: str) -> None:
    plain = [sample(model, None, seed=seed).sequences for seed in range(4)]
    cache, replayed, done = LogitsCache(60_000), [0], [threading.Event(), threading.Event()]

    def write(number: int) -> None:
        twin = hf_parallel.enable(copy.deepcopy(model))
        try:
            for seed in range(12):
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
            if count % 4 == 3:  # seldom enough for a busy machine to replay something meanwhile
                cache.clear()

    together(lambda: write(0), lambda: write(1), disturb)
    assert sum(replayed) > 0
    assert cache.num_bytes == sum(state.num_bytes for _, state in cache.nodes() if state.parent is not None)
    assert all(state.pins == 0 for _, state in cache.nodes())


@pytest.mark.parametrize("replay", ["stepwise", "hotspot"])
def test_the_logits_of_evicted_nodes_are_freed(model: PreTrainedModel, replay: str) -> None:
    others = {id(logits) for logits in gc.get_objects() if type(logits) is CachedLogits}

    def alive() -> list[CachedLogits]:
        return [logits for logits in gc.get_objects() if type(logits) is CachedLogits and id(logits) not in others]

    cache, most = LogitsCache(20_000), 0

    class Counts:
        passes = 0

        def put(self, value: torch.Tensor) -> None:
            nonlocal most
            self.passes += 1
            if self.passes % 15:  # a scan of all objects takes long
                return
            most = max(most, sum(logits.num_bytes for logits in alive()))

        def end(self) -> None:
            """Has nothing to end."""

    for seed in range(2):
        settings = {"max_new_tokens": 60, "min_new_tokens": 60, "prefetch": True, "replay": replay}
        sample(model, cache, seed=seed, streamer=Counts(), **settings)
        gc.collect()
    assert 10_000 < most <= cache.max_bytes
