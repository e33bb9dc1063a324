"""Settings: a dataclass that remembers which of its values were given, and what may be stored or sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import Self

from hf_parallel.generation.validation import json_error

Arguments: TypeAlias = dict[str, Any]
"""Arguments of `generate`, settings of a mode or fields of an output, by name."""
NOT_STORED: Mapping[str, bool] = {"stored": False, "remote": False}
"""Metadata of a setting whose value exists in the running process only: never saved, nor accepted by a server."""
NOT_REMOTE: Mapping[str, bool] = {"remote": False}
"""Metadata of a setting that a server does not accept, such as a regular expression, which may be slow."""


@dataclass
class Settings:
    """Base of `ParallelConfig`. The fields of a subclass are its settings."""

    _given: set[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Store which settings were passed: one passed with its default value still overrides a stored one."""
        self = super().__new__(cls)
        self._given = {*cls.fields()[: len(args)], *settings}
        return self

    @classmethod
    def fields(cls) -> list[str]:
        """Return the names of the settings."""
        return [f.name for f in dataclasses.fields(cls) if f.init]

    @classmethod
    def not_stored(cls) -> set[str]:
        """Return the names of the settings that are never saved."""
        return {f.name for f in dataclasses.fields(cls) if not f.metadata.get("stored", True)}

    @classmethod
    def not_remote(cls) -> set[str]:
        """Return the names of the settings that a server does not accept, including settings that are never saved."""
        return {f.name for f in dataclasses.fields(cls) if not f.metadata.get("remote", True)}

    def defaults(self) -> Self:
        """Return an object with the default of each setting that was not given."""
        return type(self)()

    def given(self) -> Arguments:
        """Return the settings that were given or differ from the defaults."""
        defaults = self.defaults()
        settings = {}
        for name in self.fields():
            value = getattr(self, name)
            if name in self._given or value != getattr(defaults, name):
                settings[name] = value
        return settings

    def to_dict(self) -> Arguments:
        """Return `given()` without `not_stored()`, ready for `generation_config.json`."""
        return {name: value for name, value in self.given().items() if name not in self.not_stored()}

    def check_storable(self) -> None:
        """Raise `ValueError` if a setting of `not_stored()` has a value."""
        for name in self.not_stored():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} cannot be stored, it is an object of this process: pass it in each call")

    def stored(self) -> Arguments:
        """Return `to_dict()` after a JSON round trip; raise `ValueError` if a setting is not JSON-serializable."""
        settings = self.to_dict()
        for field in dataclasses.fields(self):
            is_texts = "Sequence[str]" in str(field.type)
            if is_texts and settings.get(field.name) is not None:
                settings[field.name] = list(settings[field.name])  # as JSON has no tuples
        for name, value in settings.items():
            reason = json_error(value)
            if reason:
                raise ValueError(f"{name}={value!r} cannot be stored: {reason}")
        return settings
