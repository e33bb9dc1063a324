"""The registry of generation modes: those of the package, and those of other packages by their entry points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

ENTRY_POINTS = "hf_parallel.modes"
"""Entry-point group: the name is the mode's, the value a `ParallelConfig` subclass (or a module that defines it)."""


class ModeRegistry(Mapping[str, Any]):
    """Modes by name. A mode of another package is imported when it is first looked up."""

    def __init__(self) -> None:
        self._modes: dict[str, Any] = {}

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=ENTRY_POINTS)}

    def register(self, name: str, cls: type) -> None:
        """Add a mode. Subclasses of `ParallelConfig` that have a `mode` do this by themselves."""
        self._modes[name] = cls

    def __getitem__(self, name: str) -> Any:
        if name not in self._modes and name in self._entry_points:
            self._entry_points[name].load()
        return self._modes[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._modes, **self._entry_points})

    def __len__(self) -> int:
        return len(self._modes.keys() | self._entry_points.keys())


MODES = ModeRegistry()
"""The modes by name."""
