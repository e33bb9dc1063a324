"""Files of saved sessions: settings, and the journal of everything that happened, from which a session is restored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_parallel.files import write_atomically

FORMAT = "hf_parallel.HogwildSession"
VERSION = 1


def write_journal(path: str | Path, state: dict[str, Any]) -> None:
    """Write the state of a session, plain data, to a JSON file, atomically."""
    write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(state), **state}))


def read_journal(path: str | Path) -> dict[str, Any]:
    """Read a file of `write_journal`. Raise `OSError` if it is missing, `ValueError` if it is damaged or outdated."""
    try:
        state = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a saved session, or only a part of one: {error}") from error
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a saved session: it must be a JSON object whose 'format' is {FORMAT!r}")
    version = state.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{path} is a session of version {version!r}, but only version {VERSION} can be read")
    if state.pop("digest", None) != _digest(state):
        raise ValueError(f"{path} is damaged: its content does not match its digest")
    return state


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
