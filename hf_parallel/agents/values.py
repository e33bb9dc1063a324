"""Value functions of supervisors.

Any function from a `State` to a number is a value function, such as a verifier that compares `state.yielded` with an
answer. A coroutine function may use `Chat`, `spawn`, `next` and `tool`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from hf_parallel.agents.agent import Agent
from hf_parallel.agents.calls import next, spawn
from hf_parallel.agents.state import State

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def scored_by(agent: Agent, *, default: float | None = None) -> Callable[[State], Awaitable[float]]:
    """Return a value function that starts an agent with `state.text` and takes the number that it yields.

    Parameters
    ----------
    agent : Agent
        If it yields a text, the first number in it counts.
    default : float, optional
        Value of a text without a number. Default: raise `ValueError`.

    Examples
    --------
    >>> @agent
    ... async def judge(text):
    ...     chat = Chat()
    ...     chat.user(f"Rate this answer from 0 to 10. Reply with the number.\\n\\n{text}")
    ...     yield await chat.gen(max_new_tokens=4)
    >>> answer.under(BestOfN(4, value=scored_by(judge, default=0)))
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"scored_by needs an agent, got {agent!r}: decorate the function with @agent")

    async def value(state: State) -> float:
        found = await next(spawn(agent, state.text))
        if not isinstance(found, str):
            return float(found)
        if (match := NUMBER.search(found)) is not None:
            return float(match[0])
        if default is None:
            raise ValueError(f"agent {agent.name} must yield a number, got {found!r}")
        return default

    return value
