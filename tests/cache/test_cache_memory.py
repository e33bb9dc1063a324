"""Memory of a cache: storage grows without holes, and each token is copied O(1) times (amortized)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_cache import HEAD_DIM, KV_HEADS, append, assert_holds, new_cache
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.cache import Arena, Segment
from hf_parallel.kernels import LayerStorage

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
def test_four_thousand_appends_copy_each_token_a_bounded_number_of_times(rows: int) -> None:
    cache = new_cache()
    blocks = cache.pool.new_blocks(rows)
    appends = 4_000 // rows
    key = torch.zeros(KV_HEADS, rows, HEAD_DIM, dtype=torch.float64)
    with Copied() as copied:
        for _ in range(appends):
            cache.pool.arena.write(0, key, key, cache.prepare([Segment([block], 1) for block in blocks]).plan)
            cache.commit()
    assert [block.length for block in blocks] == [appends] * rows
    assert cache.kv_bytes <= copied.bytes <= 8 * cache.kv_bytes
    assert cache.pool.arena.reserved_bytes <= 8 * cache.kv_bytes


# Capacity


def limit_memory(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Make the allocation of more than `slots` slots fail."""
    grow = Arena._grow

    def limited(arena: Arena, layer: LayerStorage) -> None:
        if layer.keys.shape[0] < arena.num_slots * KV_HEADS > slots * KV_HEADS:
            raise torch.OutOfMemoryError(f"no memory for {arena.num_slots} slots")
        grow(arena, layer)

    monkeypatch.setattr(Arena, "_grow", limited)


def test_growth_that_runs_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    one, other = cache.pool.new_blocks(2, 4)
    append(cache, ([one], [1, 2, 3, 4]), ([other], [5, 6, 7]))
    with monkeypatch.context() as patch:
        limit_memory(patch, 20)
        for attempt in (lambda: append(cache, ([one], [8] * 30)), lambda: cache.pool.copy(one, 30)):
            with pytest.raises(torch.OutOfMemoryError):
                attempt()
            assert_holds(cache, one, [1, 2, 3, 4])
        append(cache, ([other], [8]), ([cache.pool.new_block(4)], [9]))
        assert_holds(cache, other, [5, 6, 7, 8])
        origin = one.extent.origin
        cache.pool.free(one)
        assert cache.pool.new_block(4).extent.origin == origin
    append(cache, ([other], [9, 10]))
    assert_holds(cache, other, [5, 6, 7, 8, 9, 10])
