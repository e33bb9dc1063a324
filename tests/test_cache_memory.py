"""What a cache costs: storage grows with what is held, leaves no holes, and no token is copied often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_cache import BYTES_PER_TOKEN, HEAD_DIM, KV_HEADS, append, assert_holds, new_cache
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.cache import Arena, Segment
from hf_parallel.cache.arena import LayerStorage

pytestmark = pytest.mark.usefixtures("one_thread")


# Copies


class Copied(TorchDispatchMode):
    """Counts the bytes that operators write into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.index_put_, torch.ops.aten.index_copy_):
            source = args[-1] if func.overloadpacket is not torch.ops.aten.copy_ else args[0]
            self.bytes += source.numel() * source.element_size()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 4])
def test_ten_thousand_appends_copy_each_token_a_bounded_number_of_times(rows: int) -> None:
    cache = new_cache()
    blocks = cache.new_blocks(rows)
    appends = 10_000 // rows
    key = torch.zeros(KV_HEADS, rows, HEAD_DIM, dtype=torch.float64)
    with Copied() as copied:
        for _ in range(appends):
            cache.arena.write(0, key, key, cache.prepare([Segment([block], 1) for block in blocks]).plan)
            cache.commit()
    assert [block.length for block in blocks] == [appends] * rows
    assert cache.kv_bytes <= copied.bytes <= 8 * cache.kv_bytes
    assert cache.arena.reserved_bytes <= 8 * cache.kv_bytes


def test_many_small_blocks_do_not_copy_each_other_whenever_one_more_is_made() -> None:
    cache = new_cache()
    key = torch.zeros(KV_HEADS, 1, HEAD_DIM, dtype=torch.float64)
    with Copied() as copied:
        for _ in range(2000):
            cache.arena.write(0, key, key, cache.prepare([Segment([cache.new_block(1)], 1)]).plan)
            cache.commit()
    assert cache.kv_bytes == 2000 * BYTES_PER_TOKEN
    assert copied.bytes <= 5 * cache.kv_bytes


def test_a_finished_step_moves_only_itself() -> None:
    cache = new_cache()
    history, step = cache.new_block(4000), cache.new_block(40)
    append(cache, ([history], range(2000)), ([history, step], range(3000, 3040)))
    with Copied() as copied:
        cache.move(step, history)
    assert copied.bytes == 40 * BYTES_PER_TOKEN
    assert_holds(cache, history, [*range(2000), *range(3000, 3040)])


# Room


def test_blocks_that_grow_and_grow_take_no_more_memory_than_they_have_room() -> None:
    cache = new_cache()
    root, *blocks = cache.new_block(64), *cache.new_blocks(4, 8)
    append(cache, ([root], range(64)))
    for token in range(512):
        append(cache, *(([root, block], [token]) for block in blocks))
    assert cache.arena.reserved_bytes == cache.kv_bytes


def limit_memory(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Let storage of more than so many slots not be had."""
    grow = Arena._grow

    def limited(arena: Arena, layer: LayerStorage) -> None:
        if layer.keys.shape[0] < arena.num_slots * KV_HEADS > slots * KV_HEADS:
            raise torch.OutOfMemoryError(f"no room for {arena.num_slots} slots")
        grow(arena, layer)

    monkeypatch.setattr(Arena, "_grow", limited)


def test_growth_for_which_there_is_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    one, other = cache.new_blocks(2, 4)
    append(cache, ([one], [1, 2, 3, 4]), ([other], [5, 6, 7]))
    with monkeypatch.context() as patch:
        limit_memory(patch, 20)
        for attempt in (lambda: append(cache, ([one], [8] * 30)), lambda: cache.fork(one, 30)):
            with pytest.raises(torch.OutOfMemoryError):
                attempt()
            assert_holds(cache, one, [1, 2, 3, 4])
        append(cache, ([other], [8]), ([cache.new_block(4)], [9]))
        assert_holds(cache, other, [5, 6, 7, 8])
        place = one.extent.origin
        cache.free(one)
        assert cache.new_block(4).extent.origin == place
    append(cache, ([other], [9, 10]))
    assert_holds(cache, other, [5, 6, 7, 8, 9, 10])


def test_there_is_room_in_every_layer_before_the_first_one_writes() -> None:
    """Also for what writes by itself later on, such as a captured decode step."""
    cache = new_cache()
    append(cache, ([cache.new_block(4)], [1, 2]))
    cache.prepare([Segment([cache.new_block(1000)], 1)])
    assert cache.storage(0).keys.shape[0] >= cache.arena.num_slots * KV_HEADS


def test_memory_that_could_not_be_had_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    append(cache, ([cache.new_block(4)], [1, 2]))
    limit_memory(monkeypatch, 100)
    large = cache.new_block(1000)
    with pytest.raises(torch.OutOfMemoryError):
        append(cache, ([large], [3]))
    cache.free(large)
    small = cache.new_block(10)
    append(cache, ([small], [4]))
    assert_holds(cache, small, [4])
