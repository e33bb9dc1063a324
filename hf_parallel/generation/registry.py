"""Registry of generation modes: built-in ones, and modes of other packages, found by their entry points."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeAlias

Mode: TypeAlias = Any
"""A subclass of `ParallelConfig`, whose file imports this one."""
BUILT_IN = "hf_parallel.generation.modes"
ENTRY_POINTS = "hf_parallel.modes"
"""Entry-point group. The name is the mode's, the value its `ParallelConfig` subclass or the module that defines it."""


class ModeRegistry(MutableMapping[str, Mode]):
    """Modes by name: subclasses of `ParallelConfig`.

    A subclass that sets `mode` registers itself. Built-in modes and modes of other packages are imported when they are
    first looked up.
    """

    def __init__(self) -> None:
        self._modes: dict[str, Mode] = {}

    def __getitem__(self, name: str) -> Mode:
        if name not in self._modes:
            import_module(BUILT_IN)
        if name not in self._modes:
            for point in entry_points(group=ENTRY_POINTS, name=name):
                point.load()
                if name not in self._modes:
                    raise ImportError(f"entry point {point.value!r} of {ENTRY_POINTS} does not define a mode {name!r}")
        return self._modes[name]

    def __setitem__(self, name: str, cls: Mode) -> None:
        self._modes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._modes[name]

    def __iter__(self) -> Iterator[str]:
        import_module(BUILT_IN)
        return iter({**self._modes, **dict.fromkeys(entry_points(group=ENTRY_POINTS).names)})

    def __len__(self) -> int:
        return len(list(iter(self)))


MODES = ModeRegistry()
