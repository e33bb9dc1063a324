"""Checkpoint: what is to be taken back if a change of a session does not come to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_parallel.cache import BlockCache
from hf_parallel.generation.sampling import TokenTable


class Checkpoint:
    """The attributes of objects as they are now, and how long the blocks of a cache are.

    Lists, dictionaries and sets are kept with what they hold, whatever is done to them afterwards; objects in them are
    not. Blocks that are made later are freed, but what is freed or moved later is not brought back.

    Parameters
    ----------
    cache : BlockCache
    table : TokenTable
    things : sequence of objects
        With attributes of their own; `table` needs not be among them.
    """

    def __init__(self, cache: BlockCache, table: TokenTable, things: Sequence[Any]) -> None:
        self._cache, self._table = cache, table
        self._lengths = {block: block.length for block in cache.blocks}
        self._held = [
            (thing, [_keep(name, value) for name, value in vars(thing).items()]) for thing in (*things, table)
        ]

    def restore(self) -> None:
        """Take everything back."""
        for thing, held in self._held:
            vars(thing).clear()
            for name, value, content in held:
                if isinstance(content, list):
                    value[:] = content
                elif content is not None:
                    value.clear()
                    value.update(content)
                vars(thing)[name] = value
        for row, length in enumerate(self._table.lengths):
            self._table.truncate(row, length)
        for block in self._cache.blocks - self._lengths.keys():
            self._cache.free(block)
        for block, length in self._lengths.items():
            block.length = length


def _keep(name: str, value: Any) -> tuple[str, Any, Any]:
    """An attribute: its name, its value, and what that holds."""
    if isinstance(value, list):
        return name, value, list(value)
    return name, value, value.copy() if type(value) in (dict, set) else None
