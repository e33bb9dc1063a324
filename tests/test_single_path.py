"""LogitsCache.keep_last_path: what was visited last stays as it was, all else is gone, and bytes are counted truly."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from test_logits_cache import VOCABULARY, logits_of, read, write

from hf_parallel import LogitsCache
from hf_parallel.cache.cached_logits import TENSOR_BYTES
from hf_parallel.cache.logits import STATE_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")


def true_bytes(cache: LogitsCache) -> int:
    return sum(state.num_bytes for _, state in cache._states() if state.parent is not None)


def test_of_all_continuations_the_last_one_is_kept() -> None:
    cache = LogitsCache()
    write(cache, [1, 2], 5, 6, 7)
    write(cache, [1, 2], 5, 9, 7)
    write(cache, [4], 5, 6)
    write(cache, [1, 2], 5, 9, 8)
    cache.keep_last_path()
    assert len(cache) == 3
    for tokens in ([1, 2], [1, 2, 5], [1, 2, 5, 9]):
        found = read(cache, tokens)
        assert found is not None
        assert torch.equal(found, logits_of(tokens))
    for tokens in ([4], [1, 2, 5, 6]):
        assert read(cache, tokens) is None


def test_prompts_that_begin_alike_are_told_apart_by_their_last_visit() -> None:
    cache = LogitsCache()
    for prompt in ([1, 7, 2], [1, 8, 2], [1, 9, 2], [1, 8, 2]):
        write(cache, prompt, 5)
    cache.keep_last_path()
    assert len(cache) == 1
    assert read(cache, [1, 8, 2]) is not None


def test_each_model_has_a_path_of_its_own() -> None:
    cache = LogitsCache()
    for key in ("one", "two"):
        for prompt in ([1], [2]):
            write(cache, prompt, 5, key=key)
    cache.keep_last_path()
    assert len(cache) == 2
    for key in ("one", "two"):
        assert read(cache, [2], key) is not None


def test_a_path_ends_where_it_was_left_last() -> None:
    cache = LogitsCache()
    write(cache, [1], 2, 3, 4, 5)
    write(cache, [1], 2, 3)
    cache.keep_last_path()
    assert len(cache) == 3
    assert read(cache, [1, 2, 3]) is not None
    assert read(cache, [1, 2, 3, 4]) is None


def test_what_is_forgotten_is_held_by_nobody_and_counted_no_more() -> None:
    cache = LogitsCache()
    for taken in range(10, 15):
        write(cache, [1], taken, 7)
    states = [weakref.ref(state) for _, state in cache._states()]
    held = next(state for _, state in cache._states() if state.token == 10)
    assert held.logits is not None
    cache.keep_last_path()
    assert (held.alive, held.logits) == (False, None)
    del held
    gc.collect()
    assert sum(state() is not None for state in states) == 4  # the root, the prompt, and what follows it
    assert cache.num_bytes == true_bytes(cache) == 3 * STATE_BYTES + 2 * (VOCABULARY * 4 + TENSOR_BYTES)


def test_what_is_kept_goes_when_there_is_no_room_any_more() -> None:
    cache = LogitsCache(12 * (VOCABULARY * 4 + STATE_BYTES + TENSOR_BYTES))
    for taken in range(10, 15):
        write(cache, [1], taken, 7)
    write(cache, [1], 14)  # an inner state until now, which could not go before its end
    cache.keep_last_path()
    write(cache, [9], *range(11))
    assert len(cache) == 11
    assert read(cache, [1, 14]) is None
    assert cache.num_bytes == true_bytes(cache) <= cache.max_bytes


def test_rows_on_forgotten_states_go_on_and_leave_nothing() -> None:
    cache = LogitsCache()
    with cache.cursors() as cursors:
        cursors.start("mine", "model", [1, 2])
        cursors.remember("mine", logits_of([1, 2]))
        cursors.start("last", "model", [7])
        cache.keep_last_path()
        assert cursors.known("mine")
        cursors.follow("mine", 3)
        assert not cursors.remember("mine", logits_of([1, 2, 3]))
    assert len(cache) == 0
    assert cache.num_bytes == true_bytes(cache) == STATE_BYTES


def test_a_cache_without_states_stays_empty() -> None:
    cache = LogitsCache()
    cache.keep_last_path()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_threads_may_write_meanwhile() -> None:
    cache, wrong = LogitsCache(200_000), []
    stop = time.perf_counter() + 1

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        while time.perf_counter() < stop:
            taken = random.integers(0, 4, 5).tolist()
            write(cache, [1, 2], *taken)
            found = read(cache, [1, 2, *taken[:2]])
            if found is not None and not torch.equal(found, logits_of([1, 2, *taken[:2]])):
                wrong.append(taken)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        cache.keep_last_path()
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.num_bytes == true_bytes(cache)
    assert all(state.pins == 0 for _, state in cache._states())
