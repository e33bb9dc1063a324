"""Files of saved sessions: settings, and the journal of everything that happened, from which a session is restored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_parallel.files import write_atomically
from hf_parallel.generation.validation import is_int

FORMAT = "hf_parallel.HogwildSession"
VERSION = 1


def write_journal(path: str | Path, state: dict[str, Any]) -> None:
    """Write the state of a session, plain data, to a JSON file, atomically."""
    write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(state), **state}))


def read_journal(path: str | Path) -> dict[str, Any]:
    """Read a file of `write_journal`. Raise `OSError` if it is missing, `ValueError` if it is damaged or outdated.

    Checks types only, as a digest does not protect against deliberate changes; values are checked where they are
    used.
    """
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
    for name, (is_valid, description) in _FIELDS.items():
        if not is_valid(state.get(name)):
            raise ValueError(f"{path} is damaged: {name} must be {description}")
    for number, event in enumerate(state["journal"]):
        if not _is_event(event):
            raise ValueError(f"{path} is damaged: journal[{number}] must be a pass or a change, got {event!r:.200}")
    return state


def _is_count(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**63


def _list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, "a string"),
    "transformers": (_is_text, "a string"),
    "prompt": (_list_of(_is_count), "a list of tokens"),
    "settings": (lambda value: isinstance(value, dict), "an object"),
    "given": (lambda value: value is None or _list_of(_is_text)(value), "a list of strings"),  # older files lack it
    "generation": (lambda value: isinstance(value, dict), "an object"),
    "helpers": (_list_of(_is_text), "a list of strings"),
    "journal": (lambda value: isinstance(value, list), "a list"),
    "tokens": (_list_of(_list_of(_is_count)), "a list of lists of tokens"),
}
"""Fields of a file, a check of their values, and what the values must be."""
_EVENTS: tuple[dict[str, Callable[[Any], bool]], ...] = (
    {"pass": lambda value: bool(value) and _list_of(lambda row: _list_of(_is_count)(row) and len(row) == 3)(value)},
    {"tell": lambda value: value is None or _is_count(value), "text": _is_text, "tokens": _list_of(_is_count)},
    {"add": _is_text},
    {"remove": _is_count},
    {"forget": _is_count},
)
"""Keys of the events of a journal, see `SteppedRun.apply`, with checks of their values."""


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and any(
        event.keys() == checks.keys() and all(is_valid(event[name]) for name, is_valid in checks.items())
        for checks in _EVENTS
    )


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
