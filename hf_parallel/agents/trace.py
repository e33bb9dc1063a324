"""Trace of a run: what each agent did and when, as plain data that JSON can hold."""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hf_parallel.files import (
    COUNT,
    FINITE,
    NUMBER,
    OBJECT,
    TEXT,
    TEXT_OR_NULL,
    Field,
    JSONObject,
    check_fields,
    read_json,
    write_atomically,
)

FORMAT, VERSION = "hf_parallel agents", 1
"""Values of `format` and `version` in the file of a trace."""
STATUSES = ("committed", "selected", "dropped")
"""Actions of a supervisor on a state."""


@dataclass(slots=True)
class Event:
    """One event of an agent.

    Attributes
    ----------
    time
        Seconds since the run began. Events with a duration (`gen`, `tool`, `next`) are recorded at their end, and have
        `begin` in their data.
    agent
        Id of the agent instance, such as `solve#0`. Those of its children begin with it: `solve#0/gather#1`.
    kind
        `spawn`, `gen`, `tool`, `next`, `resume`, `yield`, `state`, `end`, `error`, `cancel`, `kv` (`bytes` of the KV
        cache) or `scores` (contribution `scores` by agent). Readers ignore other kinds.
    state
        Id of the state in the agent's search tree, such as `0.2.1`.
    data
        Entries of this kind. `line`, if known, is the line of the agent's source.
    """

    time: float
    agent: str
    kind: str
    state: str = ""
    data: JSONObject = field(default_factory=dict)


@dataclass
class RunTrace:
    """Events of a run, in order.

    Attributes
    ----------
    events
        Grows during the run. Given events come first, and the time continues from the last of them.
    clock
        Returns seconds that never decrease.
    """

    events: list[Event] = field(default_factory=list)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._began = self.clock() - (self.events[-1].time if self.events else 0.0)

    def now(self) -> float:
        """Return the seconds since the run began."""
        return self.clock() - self._began

    def add(self, agent: str, kind: str, /, state: str = "", **data: object) -> Event:
        """Append an event that happens now, and return it. Its data is checked when the trace is read."""
        event = Event(self.now(), agent, kind, state, data)
        self.events.append(event)
        return event

    def to_dict(self) -> dict[str, object]:
        """Return the trace as plain data. Values that JSON does not have become their `repr`."""
        names = Event.__slots__
        events = [{name: _plain(getattr(event, name)) for name in names} for event in self.events]
        return {"format": FORMAT, "version": VERSION, "events": events}

    @classmethod
    def from_dict(cls, data: object) -> RunTrace:
        """Return a trace from the data of `to_dict`.

        Raises
        ------
        ValueError
            If the data is not a trace, has another version, or has an event with a missing or invalid entry.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError(f"not a trace of agents: it must be a JSON object whose 'format' is {FORMAT!r}")
        if data.get("version") != VERSION:
            raise ValueError(f"the trace has version {data.get('version')!r}, but only version {VERSION} can be read")
        events = data.get("events")
        if not isinstance(events, list):
            raise ValueError(f"events must be a list, got {reprlib.repr(events)}")
        return cls([_event(entry, f"event {index}") for index, entry in enumerate(events)])

    def save(self, path: str | Path) -> None:
        """Save the trace as JSON. Values that are not finite are written as `NaN` or `Infinity`."""
        write_atomically(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> RunTrace:
        """Load a trace that `save` wrote. Raises `ValueError`, which names the problem, for any other file."""
        data = read_json(path)
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def function_name(agent: str) -> str:
    """Return the name of the function of an agent instance: `gather` for `solve#0/gather#1`."""
    return agent.rpartition("/")[2].rpartition("#")[0] or agent


def _plain(value: object) -> object:
    """Return a value as JSON can hold it."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | Set):
        return [_plain(entry) for entry in value]
    return repr(value)


_TIME = Field(lambda value: FINITE.is_valid(value) and value >= 0, "a number of seconds from 0")
_ID = Field(lambda value: TEXT.is_valid(value) and value != "", "the id of an agent")
_NUMBER_OR_NULL = Field(lambda value: value is None or NUMBER.is_valid(value), "a number or null")
_STATUS = Field(lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}")
_SCORES = Field(
    lambda value: isinstance(value, dict) and all(map(NUMBER.is_valid, value.values())), "an object of numbers"
)
_ENTRIES: dict[str, dict[str, Field]] = {
    "spawn": {"child": _ID, "name": TEXT},
    "gen": {
        **dict.fromkeys(("tokens", "prompt_tokens", "reused"), COUNT),
        **{"begin": _TIME, "text": TEXT, "settings": OBJECT},
    },
    "tool": {"begin": _TIME, "name": TEXT, "result": TEXT_OR_NULL, "error": TEXT_OR_NULL},
    "next": {"child": _ID, "begin": _TIME},
    "resume": {"child": _ID},
    "yield": {"value": TEXT},
    "state": {"parent": TEXT_OR_NULL, "value": _NUMBER_OR_NULL, "status": _STATUS},
    "end": {"value": TEXT},
    "error": {"error": TEXT},
    "cancel": {},
    "kv": {"bytes": COUNT},
    "scores": {"scores": _SCORES},
}
"""Required entries of each kind's data, and their allowed values."""


def _event(given: object, where: str) -> Event:
    """Return an event from plain data; raise `ValueError` that names what is wrong."""
    entry = check_fields(given, {"time": _TIME, "agent": TEXT, "kind": TEXT, "state": TEXT, "data": OBJECT}, where)
    kind, data = entry["kind"], entry["data"]
    fields = _ENTRIES.get(kind, {})
    check_fields(data, fields, f"{where} ({reprlib.repr(kind)}): data")
    if "begin" in fields and data["begin"] > entry["time"]:
        raise ValueError(f"{where}: begin {data['begin']} must not be after time {entry['time']}")
    return Event(float(entry["time"]), entry["agent"], kind, entry["state"], dict(data))
