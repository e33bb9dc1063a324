"""Checkpoint: the state of a session, to be restored if a change fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_parallel.cache import BlockCache
from hf_parallel.generation.token_table import TokenTable


class Checkpoint:
    """Copies of the attributes of objects, and the lengths of the blocks of a cache.

    Lists, dicts and sets are restored in place, with their items; the items themselves are not copied. `restore` frees
    blocks that were allocated later, but cannot bring back blocks that were freed or moved later.

    Parameters
    ----------
    cache : BlockCache
    table : TokenTable
    objects : sequence of objects
        With a `__dict__`.
    """

    def __init__(self, cache: BlockCache, table: TokenTable, objects: Sequence[Any]) -> None:
        self._cache, self._table = cache, table
        self._lengths = {block: block.length for block in cache.blocks}
        self._attributes = [
            (item, [(name, value, _items(value)) for name, value in vars(item).items()]) for item in (*objects, table)
        ]

    def restore(self) -> None:
        """Restore all objects and the cache."""
        for item, attributes in self._attributes:
            vars(item).clear()
            for name, value, items in attributes:
                if isinstance(items, list):
                    value[:] = items
                elif items is not None:
                    value.clear()
                    value.update(items)
                vars(item)[name] = value
        for row, length in enumerate(self._table.lengths):
            self._table.truncate(row, length)
        for block in self._cache.blocks - self._lengths.keys():
            self._cache.free(block)
        for block, length in self._lengths.items():
            block.length = length


def _items(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)
    return value.copy() if type(value) in (dict, set) else None
