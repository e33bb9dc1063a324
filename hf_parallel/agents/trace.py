"""Trace of a run: what each agent did and when, as plain data that JSON can hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hf_parallel.files import JSONObject, read_json, write_atomically

FORMAT = "hf_parallel agents"
VERSION = 1
"""Values of `format` and `version` in the file of a trace."""


@dataclass(slots=True)
class Event:
    """One event of an agent.

    Attributes
    ----------
    time
        Seconds since the run began. Events with a duration (`gen`, `tool`, `next`) are recorded at their end, and have
        `begin` in their data.
    agent
        Id of the agent instance, such as `solve#0`. The ids of its children begin with it: `solve#0/gather#1`.
    kind
        `spawn`, `gen`, `tool`, `next`, `resume`, `yield`, `state` (of a search, with its `value` and whether it was
        `committed` or `selected`), `end`, `error`, `cancel`, `kv` (`bytes` of the KV cache) or `scores` (contribution
        `scores` by role). Readers ignore other kinds.
    state
        Id of the state in the agent's search tree, such as `0.2.1`.
    data
        Entries of this kind.
    """

    time: float
    agent: str
    kind: str
    state: str = ""
    data: JSONObject = field(default_factory=dict)


@dataclass
class AgentUsage:
    """What the agents of one role have used in a run."""

    agents: int = 0
    """Instances, including copies in other paths of a search."""
    requests: int = 0
    """Requests for completions."""
    tokens: int = 0
    """New tokens."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens, and how many of them had cached keys and values."""
    tool_calls: int = 0
    seconds: float = 0.0
    """Time in which requests waited or ran, summed over requests."""


@dataclass
class RunTrace:
    """Events of a run, in order. `clock` returns seconds that never decrease."""

    events: list[Event] = field(default_factory=list)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def now(self) -> float:
        """Return the seconds since the run began."""
        return self.clock() - self._began

    def add(self, agent: str, kind: str, /, state: str = "", **data: object) -> None:
        """Append an event that happens now."""
        self.events.append(Event(self.now(), agent, kind, state, data))

    def usage(self) -> dict[str, AgentUsage]:
        """Return the tokens and calls of each role, such as `gather`, in the order in which roles began."""
        usage: dict[str, AgentUsage] = {}
        agents: set[str] = set()
        for event in self.events:
            if not event.agent:
                continue
            role = usage.setdefault(role_of(event.agent), AgentUsage())
            if event.agent not in agents:
                agents.add(event.agent)
                role.agents += 1
            if event.kind == "gen":
                role.requests += 1
                role.tokens += event.data["tokens"]
                role.prompt_tokens += event.data["prompt_tokens"]
                role.reused_tokens += event.data["reused"]
                role.seconds += event.time - event.data["begin"]
            elif event.kind == "tool":
                role.tool_calls += 1
        return usage

    def to_dict(self) -> dict[str, object]:
        """Return the trace as plain data."""
        return {"format": FORMAT, "version": VERSION, "events": [asdict(event) for event in self.events]}

    @classmethod
    def from_dict(cls, data: object, where: object = "the trace") -> RunTrace:
        """Return a trace from the data of `to_dict`; raise `ValueError` for other data."""
        if not isinstance(data, Mapping) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{where} must have the format {FORMAT!r} and version {VERSION}, got {data!r:.80}")
        try:
            return cls([Event(**entry) for entry in data["events"]])
        except (LookupError, TypeError) as error:
            raise ValueError(f"{where} is damaged: {error}") from error

    def save(self, path: str | Path) -> None:
        """Save the trace as JSON."""
        write_atomically(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> RunTrace:
        """Load a trace that `save` wrote. Raises `ValueError`, which names the file, for any other file."""
        return cls.from_dict(read_json(path), path)


def role_of(agent_id: str) -> str:
    """Return the role of an agent instance: `gather` of `solve#0/gather#1`."""
    return agent_id.rpartition("/")[2].partition("#")[0]
