"""Files of saved sessions: settings, and the journal of everything that happened, from which a session is restored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hf_parallel.files import JSONObject, read_json, write_atomically

HEAD = {"format": "hf_parallel.HogwildSession", "version": 1}


def write_journal(path: str | Path, state: JSONObject) -> None:
    """Write the state of a session, plain data, to a JSON file, atomically."""
    write_atomically(path, json.dumps({**HEAD, "digest": _digest(state), **state}))


def read_journal(path: str | Path) -> JSONObject:
    """Read a file of `write_journal`. Raise `OSError` if it is missing, `ValueError` if it is damaged or outdated."""
    state = read_json(path)
    if not isinstance(state, dict) or {name: state.pop(name, None) for name in HEAD} != HEAD:
        raise ValueError(f"{path} is not a saved session: it must be a JSON object with {HEAD}")
    if state.pop("digest", None) != _digest(state):
        raise ValueError(f"{path} is damaged: its content does not match its digest")
    return state


def _digest(state: JSONObject) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
