"""Files of saved sessions: settings, and the journal of everything that happened, from which a session is restored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hf_parallel.files import COUNT, OBJECT, TEXT, Field, JSONObject, check_fields, read_json, write_atomically

HEAD = {"format": "hf_parallel.HogwildSession", "version": 1}


def write_journal(path: str | Path, state: JSONObject) -> None:
    """Write the state of a session, plain data, to a JSON file, atomically."""
    write_atomically(path, json.dumps({**HEAD, "digest": _digest(state), **state}))


def read_journal(path: str | Path) -> JSONObject:
    """Read a file of `write_journal`. Raise `OSError` if it is missing, `ValueError` if it is damaged or outdated.

    Checks types only, as a digest does not protect against deliberate changes; values are checked where they are
    used.
    """
    state = read_json(path)
    if not isinstance(state, dict) or {name: state.pop(name, None) for name in HEAD} != HEAD:
        raise ValueError(f"{path} is not a saved session: it must be a JSON object with {HEAD}")
    if state.pop("digest", None) != _digest(state):
        raise ValueError(f"{path} is damaged: its content does not match its digest")
    check_fields(state, _FIELDS, f"{path} is damaged")
    for number, event in enumerate(state["journal"]):
        if not isinstance(event, dict) or not any(_has(event, fields) for fields in _EVENTS):
            raise ValueError(f"{path} is damaged: journal[{number}] must be a pass or a change, got {event!r:.200}")
    return state


def _list_of(field: Field, description: str) -> Field:
    return Field(lambda value: isinstance(value, list) and all(map(field.is_valid, value)), description)


_TOKENS, _TEXTS = _list_of(COUNT, "a list of tokens"), _list_of(TEXT, "a list of strings")
_SAMPLED = _list_of(Field(lambda value: _TOKENS.is_valid(value) and len(value) == 3, "three integers"), "rows")
_FIELDS = {
    "model": TEXT,
    "transformers": TEXT,
    "prompt": _TOKENS,
    "settings": OBJECT,
    "given": _TEXTS,
    "generation": OBJECT,
    "helpers": _TEXTS,
    "journal": Field(lambda value: isinstance(value, list), "a list"),
    "tokens": _list_of(_TOKENS, "a list of lists of tokens"),
}
_ROW = Field(lambda value: value is None or COUNT.is_valid(value), "a row or null")
_EVENTS: tuple[dict[str, Field], ...] = (
    {"pass": _SAMPLED},
    {"tell": _ROW, "text": TEXT, "tokens": _TOKENS},
    {"add": TEXT},
    {"remove": COUNT},
    {"forget": COUNT},
)
"""Fields of the events of a journal, see `SteppedRun.apply`."""


def _has(event: JSONObject, fields: dict[str, Field]) -> bool:
    return event.keys() == fields.keys() and all(field.is_valid(event[name]) for name, field in fields.items())


def _digest(state: JSONObject) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
