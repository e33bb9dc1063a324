"""State: a suspended agent, as the log of what its coroutine received (Hive, section 5.1).

A Python coroutine cannot be copied. To continue a state a second time, the log is replayed in a new coroutine.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_parallel.generation.prompts import Message

CHOICE = "choice"
YIELD = "yield"
END = "end"
ERROR = "error"
"""Why a coroutine is suspended: before a choice, at a yield, after its end, after an error."""


@dataclass(eq=False)
class Entry:
    """An operation of an agent and its result."""

    operation: str
    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Return a copy of the value, which protects the log from changes; raise the error if there is one."""
        if self.error is not None:
            raise self.error
        return copy.deepcopy(self.value)


class State:
    """A state of an agent, or the running transition to it.

    Attributes
    ----------
    agent : Agent
    agent_id : str
        Id of the agent's instance.
    id : str
        Index of each transition from the start, such as `0.2.1`.
    parent : State or None
    status : str
        `choice`, `yield`, `end` or `error`.
    messages : list of dict
        Conversation of the pending choice.
    text : str
        Last completion of a choice.
    yielded : object
        Yielded or returned value, if the status is `yield` or `end`.
    value : float or None
        Result of the supervisor's value function.
    tokens : int
        New tokens of the transition.
    """

    def __init__(
        self,
        agent: Any,
        agent_id: str,
        arguments: tuple[tuple[object, ...], Mapping[str, object]],
        parent: State | None = None,
    ) -> None:
        self.agent = agent
        self.agent_id = agent_id
        self.arguments = arguments
        self.parent = parent
        self.num_children: int = 0
        self.text: str = parent.text if parent is not None else ""
        self.id = "0"
        if parent is not None:
            self.id = f"{parent.id}.{parent.num_children}"
            parent.num_children += 1
        self.entries: dict[str, Entry] = {}  # by place: the number of the operation in its coroutine
        self.status = ""
        self.pending = ""  # operation of the choice
        self.messages: list[Message] = []
        self.yielded: Any = None
        self.sent: object = None  # value that the transition from a yield began with
        self.value: float | None = None
        self.error: BaseException | None = None
        self.tokens = 0
        self.execution: Any = None  # the coroutine that is suspended in this state
        self.searches: list[Any] = []  # of agents that were spawned or resumed in the transition

    @property
    def path(self) -> list[State]:
        """The states from the start to this one."""
        states = [self]
        parent = self.parent
        while parent is not None:
            states.append(parent)
            parent = parent.parent
        return states[::-1]

    @property
    def conversation(self) -> list[Message]:
        """Messages of the last choice with its completion; at the start of a search, those of the next choice."""
        if self.parent is None or not self.parent.is_choice:
            return list(self.messages)
        return [*self.parent.messages, {"role": "assistant", "content": self.text}]

    @property
    def depth(self) -> int:
        """Number of transitions since the start."""
        return self.id.count(".")

    @property
    def is_final(self) -> bool:
        """Whether the agent has yielded or ended, so that a search ends here."""
        return self.status in (YIELD, END)

    @property
    def is_choice(self) -> bool:
        """Whether different completions can continue it."""
        return self.status == CHOICE

    def __repr__(self) -> str:
        return f"State({self.agent_id}, {self.id}, {self.status})"


def derive_seed(*parts: object) -> int:
    """Return a seed of 62 bits that depends on all parts."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def digest(*values: object) -> str:
    """Return a short hash of values that is the same in every replay; see `fingerprint`."""
    return hashlib.sha256(repr(fingerprint(values)).encode()).hexdigest()[:16]


def fingerprint(value: object) -> object:
    """Return plain data that is the same in every replay; an object becomes the name of its type."""
    if isinstance(value, Mapping):
        return {str(name): fingerprint(item) for name, item in sorted(value.items(), key=str)}
    if isinstance(value, list | tuple):
        return [fingerprint(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return type(value).__name__


def check_awaited(value: object, what: str) -> None:
    """Raise `TypeError` if a value is a coroutine, or holds one, as where an `await` was forgotten."""
    if inspect.iscoroutine(value):
        raise TypeError(f"{what} is a coroutine, {value.__qualname__}(...): is an await missing?")
    if isinstance(value, Mapping):
        check_awaited(list(value.values()), what)
    elif isinstance(value, list | tuple):
        for item in value:
            check_awaited(item, what)


def joined_contents(messages: Sequence[Message]) -> str:
    """Return the text of a conversation for a tokenizer without a chat template."""
    return "\n".join(str(message["content"]) for message in messages)
