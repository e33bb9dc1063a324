"""Traces: the requests of agents, by prefixes and lengths, for the simulator and the engine."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hf_parallel.engine.hints import AgentHints
from hf_parallel.files import COUNT, FINITE, TEXT, Field, check_fields, read_json, write_atomically
from hf_parallel.generation.validation import check_int

PromptSegment: TypeAlias = tuple[str, int] | list[int]
"""Part of a prompt: a name and a number of tokens, which are equal for equal names; or token ids."""
MAX_TOKENS = 1 << 24
"""Largest token id in a file, and tokens of a segment."""
_SECONDS = Field(lambda value: FINITE.is_valid(value) and value >= 0, "a number of seconds from 0")
_FLAG = Field(lambda value: isinstance(value, bool), "true or false")
_SEGMENTS = Field(lambda value: isinstance(value, list) and bool(value), "a list of segments, and not empty")


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace.

    Parameters
    ----------
    agent : str
        Role of the agent; `agent_id` of its hints.
    prompt : sequence of segments
        Each a name and a number of tokens, or a list of token ids.
    output : segment
        Tokens that are generated, at least one.
    gap : float
        Seconds since the previous request of the trace has ended.
    workflow : str
        `workflow_id` of its hints.
    tool_ms : float, optional
        `expected_tool_duration_ms` of its hints.
    is_hotspot : bool
        Whether its hits and misses are counted as those of a hotspot.
    """

    agent: str
    prompt: tuple[PromptSegment, ...]
    output: PromptSegment
    gap: float = 0.0
    workflow: str = ""
    tool_ms: float | None = None
    is_hotspot: bool = False

    @property
    def hints(self) -> AgentHints:
        """Hints that the request is submitted with."""
        return AgentHints(self.workflow, self.agent, expected_tool_duration_ms=self.tool_ms)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(map(_length, self.prompt))


@dataclass(frozen=True)
class Trace:
    """Requests of agents in the order in which they run, one after the other.

    Parameters
    ----------
    requests : sequence of TraceRequest
    vocabulary : tuple of int
        Token ids of named segments are at least the first and below the second number.
    """

    requests: tuple[TraceRequest, ...]
    vocabulary: tuple[int, int] = (3, 32000)

    def prompt_of(self, request: TraceRequest) -> np.ndarray:
        """Return the token ids of a prompt, int64 `[length]`."""
        return np.concatenate([self._tokens(segment) for segment in request.prompt])

    def output_of(self, request: TraceRequest) -> np.ndarray:
        """Return the token ids that are generated, int64 `[length]`."""
        return self._tokens(request.output)

    def _tokens(self, segment: PromptSegment) -> np.ndarray:
        if isinstance(segment, list):
            return np.array(segment, np.int64)
        return _named_tokens(segment[0], segment[1], *self.vocabulary)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        write_atomically(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` has written, or that has the same form. Raises `ValueError` for others."""
        try:
            given = read_json(path)
            requests = [_request(one, f"request {number}") for number, one in enumerate(given.pop("requests"))]
            trace = cls(tuple(requests), **{name: tuple(value) for name, value in given.items()})
            low, high = map(_count, trace.vocabulary)
            if low >= high:
                raise ValueError(f"vocabulary must be two increasing token ids, got {[low, high]}")
            return trace
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no trace: {error!r}") from error


def _length(segment: PromptSegment) -> int:
    return len(segment) if isinstance(segment, list) else segment[1]


def _request(read: object, where: str) -> TraceRequest:
    """Return a request that was read from JSON."""
    given = check_fields(read, {"agent": TEXT, "prompt": _SEGMENTS}, where)
    fields = {**given, "prompt": tuple(map(_segment, given["prompt"])), "output": _segment(given["output"])}
    request = TraceRequest(**fields)
    check_fields(vars(request), {"gap": _SECONDS, "workflow": TEXT, "is_hotspot": _FLAG}, where)
    _ = request.hints  # raises if an id or the duration is invalid
    return request


def _segment(given: object) -> PromptSegment:
    """Return a segment that was read from JSON."""
    if isinstance(given, list) and len(given) == 2 and isinstance(given[0], str):
        check_int("length of a segment", given[1], at_least=1)
        return given[0], _count(given[1])
    if not isinstance(given, list) or not given:
        raise ValueError(f"a segment must be a name and a length, or token ids, got {given!r:.80}")
    return list(map(_count, given))


def _count(given: object) -> int:
    """Return a token id, or number of tokens, that was read from JSON."""
    if not isinstance(given, int) or not COUNT.is_valid(given) or given > MAX_TOKENS:
        raise ValueError(f"token ids and numbers of tokens must be integers from 0 to {MAX_TOKENS}, got {given!r:.80}")
    return given


@lru_cache(maxsize=4096)
def _named_tokens(name: str, length: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(low, high, length, dtype=np.int64)
