"""Settings of the modes: one dataclass per mode, checked before anything runs.

A mode is a dataclass that derives from `ParallelConfig`, names itself in `mode` and implements `run`. Deriving
registers it; nothing else has to know of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from .call import GenerationCall

MODES: dict[str, type[ParallelConfig]] = {}
"""The modes by name."""


@dataclass
class ParallelConfig:
    """Settings that every mode has.

    Parameters
    ----------
    seed : int, torch.Generator or a list of either, optional
        Source of each row's randomness. One int gives every row a generator of its own, made from the int and the
        row's number, so that a row's tokens do not depend on its batch. A list gives one per row. Default: PyTorch's
        global generator, drawn from as `generate` does.
    """

    mode: ClassVar[str] = ""

    seed: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.mode:
            MODES[cls.mode] = cls

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every setting.

        Raises
        ------
        ValueError
            Naming the setting, what was given and what is allowed.
        """
        seeds = self.seed if isinstance(self.seed, list | tuple) else [self.seed]
        for seed in seeds:
            if seed is not None and not isinstance(seed, torch.Generator) and not is_int(seed):
                raise ValueError(f"seed must be an int, a torch.Generator or a list of them, got {self.seed!r}")

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Turn what only this mode understands into what `generate` does, before it sees the arguments."""

    def run(self, call: GenerationCall) -> Any:
        """Generate. Returns what `model.generate` returns."""
        raise NotImplementedError

    @classmethod
    def fields(cls) -> list[str]:
        """Names of the settings."""
        return [f.name for f in dataclasses.fields(cls)]

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ from the defaults, ready for `generation_config.json`."""
        defaults = type(self)()
        pairs = ((name, getattr(self, name)) for name in self.fields())
        return {name: value for name, value in pairs if value != getattr(defaults, name)}


def make_config(mode: str, *sources: Mapping[str, Any] | ParallelConfig | None) -> ParallelConfig:
    """Join settings, the first source that has one winning.

    Parameters
    ----------
    mode : str
        Name of the mode.
    *sources
        Mappings of settings, or a config of the mode.

    Raises
    ------
    ValueError
        For an unknown mode or setting, or a bad value.
    """
    if mode not in MODES:
        raise ValueError(f"generation_mode must be one of {sorted(MODES)} (or None), got {mode!r}")
    cls = MODES[mode]
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        if source is None:
            continue
        if isinstance(source, ParallelConfig):
            if not isinstance(source, cls):
                raise ValueError(
                    f"parallel_config must be a {cls.__name__} for {mode!r}, got a {type(source).__name__}"
                )
            source = source.to_dict()
        elif not isinstance(source, Mapping):
            raise ValueError(f"parallel_config must be a {cls.__name__} or a mapping, got {type(source).__name__}")
        unknown = sorted(set(source) - set(cls.fields()))
        if unknown:
            raise ValueError(f"{mode!r} has no setting {unknown[0]!r} (got {source[unknown[0]]!r}); it has {cls.fields()}")
        merged.update(source)
    return cls(**merged)


def is_int(value: Any) -> bool:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(name: str, value: Any, at_least: int) -> None:
    """Raise a `ValueError` unless `value` is an int of at least `at_least`."""
    if not is_int(value) or value < at_least:
        raise ValueError(f"{name} must be an int of at least {at_least}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise a `ValueError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise a `ValueError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")


def check_text(name: str, value: Any, optional: bool = False) -> None:
    """Raise a `ValueError` unless `value` is a string (or None where that is allowed)."""
    if not isinstance(value, str) and not (optional and value is None):
        raise ValueError(f"{name} must be a string{' or None' if optional else ''}, got {value!r}")
