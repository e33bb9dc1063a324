"""LogitsCache: lookups, budget and eviction, files, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from hf_parallel import LogitsCache
from hf_parallel.cache.logits import Cursors
from hf_parallel.cache.logits_trie import NODE_BYTES, TENSOR_BYTES, CachedDistribution

VOCABULARY = 50


def logits_of(tokens: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits that are unique to these tokens."""
    seed = hash(tuple(tokens)) % 2**31
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)).to(dtype) * 3


def write(cache: LogitsCache, prompt: list[int], *taken: int, key: str = "model") -> None:
    """Store the logits of a sequence: a prompt, followed by the tokens `taken`."""
    with cache.cursors() as cursors:
        cursors.start(0, key, prompt)
        tokens = list(prompt)
        for token in taken:
            cursors.store(0, logits_of(tokens))
            cursors.advance(0, token)
            tokens.append(token)


def read(cache: LogitsCache, tokens: list[int], key: str = "model") -> torch.Tensor | None:
    with cache.cursors() as cursors:
        cursors.start(0, key, tokens)
        return logits_at(cursors, 0)


def logits_at(cursors: Cursors, row: int) -> torch.Tensor | None:
    """Dense logits at a row's node; counts a hit or a miss."""
    logits = cursors.node(row).logits
    return logits.to_dense() if cursors.lookup(row) and logits is not None else None


def counted(cache: LogitsCache) -> int:
    return sum(node.num_bytes for _, node in cache.nodes())


def test_logits_of_all_stored_continuations_are_found() -> None:
    cache = LogitsCache()
    write(cache, [1, 2], 5, 6, 7)
    write(cache, [1, 2], 5, 9, 7)
    for tokens in ([1, 2], [1, 2, 5], [1, 2, 5, 6], [1, 2, 5, 9]):
        found = read(cache, tokens)
        assert found is not None
        assert torch.equal(found, logits_of(tokens))
    for tokens in ([1], [1, 2, 6], [1, 2, 5, 6, 7], [2]):
        assert read(cache, tokens) is None
    assert (cache.hits, cache.misses, len(cache)) == (4, 4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_logits_are_stored_exactly(dtype: torch.dtype) -> None:
    cache = LogitsCache()
    with cache.cursors() as cursors:
        cursors.start(0, "model", [1])
        given = logits_of([1], dtype)
        cursors.store(0, given)
        kept = logits_at(cursors, 0)
        assert kept is not None
        assert kept.dtype == dtype
        assert torch.equal(kept, given)
        given.zero_()
        assert not torch.equal(kept, given)  # it is a copy


def test_top_k_keeps_the_highest_logits_and_the_probability_of_the_others() -> None:
    cache = LogitsCache(top_k=8)
    write(cache, [1], 2)
    kept, true = read(cache, [1]), logits_of([1])
    assert kept is not None
    top = true.topk(8)
    assert torch.equal(kept.topk(8).indices, top.indices)
    torch.testing.assert_close(kept.softmax(-1)[top.indices], true.softmax(-1)[top.indices])
    assert cache.num_bytes == 3 * NODE_BYTES + 2 * TENSOR_BYTES + 8 * (4 + 4)  # with the root


# Budget


def test_ten_thousand_insertions_stay_within_the_budget() -> None:
    random = np.random.default_rng(0)
    budget = 300_000
    cache = LogitsCache(budget)
    most = 0
    for number in range(1000):
        write(cache, [1, 2], *random.integers(0, 4, 10).tolist())
        most = max(most, cache.num_bytes)
        assert number % 10 or cache.num_bytes == counted(cache)
    assert most <= budget
    assert cache.num_bytes > 0.9 * budget


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    size = VOCABULARY * 4 + NODE_BYTES + TENSOR_BYTES
    cache = LogitsCache(8 * size)
    write(cache, [1], 2, 3, 4)
    write(cache, [9], 2, 3, 4)
    assert read(cache, [1, 2]) is not None  # used again
    write(cache, [5], 2, 3)
    assert read(cache, [1]) is not None
    assert read(cache, [1, 2]) is not None
    assert read(cache, [9, 2, 3]) is not None
    assert read(cache, [5]) is not None
    assert read(cache, [1, 2, 3]) is None  # the leaf of the least recently used continuation


def test_nodes_of_running_calls_stay_within_the_budget_too() -> None:
    """What does not fit is not stored, whichever rows and keys have cursors; later calls fill the freed memory."""
    random = Random(0)
    cache = LogitsCache(4 * (VOCABULARY * 4 + NODE_BYTES + TENSOR_BYTES))
    for _ in range(30):
        with cache.cursors() as cursors:
            for row in range(4):
                cursors.start(row, cache.root_key("model", str(random.randrange(20))), [random.randrange(3)] * 5)
            for _ in range(6):
                for row in range(4):
                    cursors.store(row, logits_of([row]))
                    cursors.advance(row, random.randrange(2))
                    assert cache.num_bytes == counted(cache) <= cache.max_bytes
        assert len(cache._roots) <= 4 * 2
        assert all(node.pins == 0 for _, node in cache.nodes())
    write(cache, [1], 2, 3)
    assert read(cache, [1, 2]) is not None


def test_roots_of_different_salts_share_nothing_and_their_keys_do_not_tell_the_salt() -> None:
    cache = LogitsCache()
    keys = [cache.root_key("model", salt) for salt in (None, "", "a", "b", "\ud800")]
    assert keys[0] == keys[1] == "model"
    assert len(set(keys)) == 4
    write(cache, [1], 2, key=keys[2])
    found = [read(cache, [1], key) is not None for key in keys]
    assert found == [False, False, True, False, False]
    other = LogitsCache()
    other.salt = bytes(16)
    assert cache.root_key("model", "secret") != other.root_key("model", "secret")


@pytest.mark.parametrize(
    "settings", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"top_k": 0}, {"top_k": "8"}, {"max_bytes": True}]
)
def test_invalid_settings_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}.*{next(iter(settings.values()))}"):
        LogitsCache(**settings)


# Files


@pytest.mark.parametrize("top_k", [None, 8])
def test_a_loaded_cache_equals_the_saved_one(tmp_path: Path, top_k: int | None) -> None:
    cache = LogitsCache(top_k=top_k)
    for key in ("one", "two"):
        write(cache, [1, 2], 5, 6, 7, key=key)
        write(cache, [1, 2], 5, 9, key=key)
    num_bytes = cache.num_bytes
    write(cache, [3], key="without logits")  # not restored
    cache.save(tmp_path / "cache.safetensors")
    loaded = LogitsCache.load(tmp_path / "cache.safetensors")
    assert (len(loaded), loaded.num_bytes, loaded.top_k) == (len(cache), num_bytes, top_k)
    for key in ("one", "two", "three"):
        for tokens in ([1, 2], [1, 2, 5, 6], [1, 2, 5, 9], [3]):
            ours, theirs = read(loaded, tokens, key), read(cache, tokens, key)
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or torch.equal(ours, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize("top_k", [None, 8])
def test_any_changed_byte_raises(tmp_path: Path, top_k: int | None) -> None:
    write(cache := LogitsCache(top_k=top_k), [1, 2], 5, 6, 7)
    cache.save(path := tmp_path / "cache")
    whole = path.read_bytes()
    random = Random(0)
    for place in [*range(min(len(whole), 400)), *(random.randrange(len(whole)) for _ in range(400))]:
        changed = bytearray(whole)
        changed[place] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="is not a readable LogitsCache"):
            LogitsCache.load(path)


# Threads


def test_concurrent_threads_read_correct_logits_and_keep_the_byte_count() -> None:
    """Eight threads write and read the same few thousand nodes."""
    cache, wrong = LogitsCache(400_000), []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        for _ in range(60):
            with cache.cursors() as cursors:
                tokens = [1, 2]
                cursors.start(number, "model", tokens)
                for token in random.integers(0, 5, 6).tolist():
                    found = logits_at(cursors, number)
                    true = logits_of(tokens)
                    if found is not None and not torch.equal(found, true):
                        wrong.append(tokens)
                    cursors.store(number, true)
                    few = true.softmax(-1) * (true >= true.topk(number % 4 + 1).values[-1])
                    cache.store_distribution(cursors.node(number), CachedDistribution.from_probs(few, (number,)))  # type: ignore[arg-type]
                    again = logits_at(cursors, number)
                    if again is not None and not torch.equal(again, true):
                        wrong.append(tokens)
                    cursors.advance(number, token)
                    tokens = [*tokens, token]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.num_bytes <= 400_000
    assert cache.num_bytes == counted(cache)
    assert all(node.pins == 0 for _, node in cache.nodes())
