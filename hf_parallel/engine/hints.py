"""AgentHints: which agent of which workflow a request belongs to. Eviction policies read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hf_parallel.generation.validation import check_text, suggestion

MAX_ID = 256
"""Characters of an id: policies keep those of many requests."""


@dataclass(frozen=True)
class AgentHints:
    """The agent of a request, under the names that SGLang and Mooncake use. Ids have at most 256 characters.

    Parameters
    ----------
    workflow_id : str
        Run of a workflow, in which agents work together.
    agent_id : str
        Role of the agent, such as "Patcher", whose contribution is scored. Empty: the request belongs to no agent.
    step_id : str, optional
        Unique id of the request.
    parent_step_id : str, optional
        Id of the request whose answer led to this one.
    expected_tool_duration_ms : float, optional
        Milliseconds from the end of this request to the agent's next one, if it calls a tool in between.
    """

    workflow_id: str = ""
    agent_id: str = ""
    step_id: str | None = None
    parent_step_id: str | None = None
    expected_tool_duration_ms: float | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a value that is not allowed."""
        for name in ("workflow_id", "agent_id", "step_id", "parent_step_id"):
            value = getattr(self, name)
            if value is None and name in ("step_id", "parent_step_id"):
                continue
            check_text(f"agent_hints: {name}", value)
            if len(value) > MAX_ID:
                raise ValueError(f"agent_hints: {name} may have at most {MAX_ID} characters, got {len(value)}")
        duration = self.expected_tool_duration_ms
        is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
        if duration is not None and not (is_number and 0 <= duration < math.inf):
            raise ValueError(f"agent_hints: expected_tool_duration_ms must be a number of at least 0, got {duration!r}")

    @classmethod
    def of(cls, given: AgentHints | Mapping[str, Any] | None) -> AgentHints:
        """Return hints, given as such, as a mapping of their names, or as None. Raises `ValueError` for others."""
        if isinstance(given, AgentHints):
            return given
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ValueError(f"agent_hints must be AgentHints or a mapping, got {type(given).__name__}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"agent_hints may have {known}, got {name!r}{suggestion(name, known)}")
        return cls(**given)
