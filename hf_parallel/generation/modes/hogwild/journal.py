"""The journal of a session: what happened in it, in order, so that it can be told again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_parallel.files import write_whole
from hf_parallel.generation.config import lost_in_json

FORMAT = "hf_parallel.HogwildSession"
VERSION = 1


def write_journal(path: str | Path, told: dict[str, Any]) -> None:
    """Write plain data to a JSON file, which appears whole or not at all.

    Raises
    ------
    ValueError
        If something in it is no plain data, named by its key.
    """
    for name, value in told.items():
        check_plain(name, value)
    write_whole(path, json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(told), **told}))


def read_journal(path: str | Path) -> dict[str, Any]:
    """What `write_journal` has written.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is none of this format and version, or not as it was written.
    """
    try:
        told = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no saved session, or a part of one: {error}") from error
    if not isinstance(told, dict) or told.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no saved session: it must be a JSON object whose 'format' is {FORMAT!r}")
    version = told.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{path} is a session of version {version!r}, this program reads version {VERSION}")
    if told.pop("digest", None) != _digest(told):
        raise ValueError(f"{path} is damaged: it is not as it was saved")
    return told


def check_plain(name: str, value: Any) -> None:
    """Raise a `ValueError` unless a value comes back from JSON as it is."""
    if lost_in_json(value):
        raise ValueError(f"{name} cannot be saved: it must be plain data, got {value!r}")


def _digest(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
