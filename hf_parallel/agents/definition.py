"""Agent: a user's coroutine and the supervisor that searches over its choices (Hive, section 5.1)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hf_parallel.agents.supervisors.base import Supervisor
from hf_parallel.agents.supervisors.paths import Single


@dataclass(frozen=True, eq=False)
class Agent:
    """An agent; made by `agent`, started by `Runtime.run` or `spawn`."""

    function: Callable[..., object]
    supervisor: Supervisor
    name: str

    def under(self, supervisor: Supervisor) -> Agent:
        """Return the same agent with another supervisor."""
        return replace(self, supervisor=_checked(supervisor))


def agent(function: Callable[..., object] | None = None, *, supervisor: Supervisor | None = None) -> Any:
    """Make an agent from an async generator function or a coroutine function.

    An agent yields values, or returns one. It suspends where it awaits `Chat.gen`, `next`, `tool` and the other
    operations of this package. A supervisor may continue a suspended agent several times: its code then runs again from
    the start and receives what it received before. So the code must be deterministic: use `now`, `rng` and `tool` for
    clocks, random numbers, files and networks.

    Parameters
    ----------
    function : callable
        Its name is the role of the agent.
    supervisor : Supervisor, optional
        Test-time scaling algorithm. Default: `Single`, one run.

    Examples
    --------
    >>> @agent(supervisor=BestOfN(4, value=lambda state: len(state.text)))
    ... async def answer(question):
    ...     chat = Chat()
    ...     chat.user(question)
    ...     yield await chat.gen(max_new_tokens=64, do_sample=True)
    """
    chosen = _checked(Single() if supervisor is None else supervisor)

    def decorate(function: Callable[..., object]) -> Agent:
        if not (inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)):
            raise TypeError(f"an agent must be an async function, got {function!r}")
        return Agent(function, chosen, function.__name__)

    return decorate if function is None else decorate(function)


def _checked(supervisor: object) -> Supervisor:
    if not isinstance(supervisor, Supervisor):
        raise TypeError(f"supervisor must be a Supervisor such as Single(), got {supervisor!r}")
    return supervisor
