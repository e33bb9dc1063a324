"""AgentHints: which agent of which workflow a request belongs to. Eviction policies read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hf_parallel.generation.validation import check_text, suggestion

MAX_ID = 256
"""Characters of an id: policies keep those of many requests."""


@dataclass(frozen=True)
class AgentHints:
    """The agent of a request, under the names that SGLang uses. Ids have at most 256 characters.

    Parameters
    ----------
    workflow_id : str
        Run of a workflow, in which agents work together.
    agent_id : str
        Role of the agent, such as "Patcher". Each role has a contribution score. Empty: the request belongs to no
        agent.
    """

    workflow_id: str = ""
    agent_id: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a value that is not allowed."""
        for name, value in vars(self).items():
            check_text(f"agent_hints: {name}", value)
            if len(value) > MAX_ID:
                raise ValueError(f"agent_hints: {name} may have at most {MAX_ID} characters, got {len(value)}")

    @classmethod
    def of(cls, given: AgentHints | Mapping[str, Any] | None) -> AgentHints:
        """Return hints, given as such, as a mapping of their names, or as None. Raises `ValueError` for others."""
        if isinstance(given, AgentHints):
            return given
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ValueError(f"agent_hints must be AgentHints or a mapping, got {type(given).__name__}")
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise ValueError(f"agent_hints may have {names}, got {name!r}{suggestion(name, names)}")
        return cls(**given)
