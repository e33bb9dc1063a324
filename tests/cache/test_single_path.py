"""LogitsCache.keep_last_path: the most recently used sequence stays, all others go, and the byte count stays exact."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_logits_cache import VOCABULARY, counted, logits_of, read, write

from hf_parallel import LogitsCache
from hf_parallel.cache.logits_trie import NODE_BYTES, TENSOR_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")


def test_only_the_last_continuation_is_kept() -> None:
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


def test_the_path_ends_at_the_last_used_node() -> None:
    cache = LogitsCache()
    write(cache, [1], 2, 3, 4, 5)
    write(cache, [1], 2, 3)
    cache.keep_last_path()
    assert len(cache) == 3
    assert read(cache, [1, 2, 3]) is not None
    assert read(cache, [1, 2, 3, 4]) is None


def test_deleted_nodes_are_freed_and_not_counted() -> None:
    cache = LogitsCache()
    for taken in range(10, 15):
        write(cache, [1], taken, 7)
    nodes = [weakref.ref(node) for _, node in cache.nodes()]
    held = next(node for _, node in cache.nodes() if node.token == 10)
    assert held.logits is not None
    cache.keep_last_path()
    assert (held.alive, held.logits) == (False, None)
    del held
    gc.collect()
    assert sum(node() is not None for node in nodes) == 4  # the root, the prompt, and two tokens
    assert cache.num_bytes == counted(cache) == 3 * NODE_BYTES + 2 * (VOCABULARY * 4 + TENSOR_BYTES)


def test_cursors_on_deleted_nodes_continue_and_store_nothing() -> None:
    cache = LogitsCache()
    with cache.cursors() as cursors:
        cursors.start("first", "model", [1, 2])
        cursors.store("first", logits_of([1, 2]))
        cursors.start("last", "model", [7])
        cache.keep_last_path()
        assert cursors.has_logits("first")
        cursors.advance("first", 3)
        assert not cursors.store("first", logits_of([1, 2, 3]))
    assert len(cache) == 0
    assert cache.num_bytes == counted(cache) == NODE_BYTES
