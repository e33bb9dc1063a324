"""Operations of an agent: `spawn` others, exchange values with them, use tools, clocks and random numbers."""

from __future__ import annotations

import asyncio
import builtins
import copy
import inspect
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from hf_parallel.agents.definition import Agent
from hf_parallel.agents.errors import AgentCancelledError, AgentEndedError, ToolError
from hf_parallel.agents.execution import Frame, current_frame, in_thread, outside_of_agents, perform
from hf_parallel.agents.search import Search
from hf_parallel.agents.state import END, State, check_awaited, derive_seed, digest, fingerprint

T = TypeVar("T")
MAX_SHOWN = 2000
"""Maximum number of characters of a tool's result in a trace."""


class AgentHandle:
    """Handle of another agent. Copies are independent: values sent to a copy do not change the original."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._is_read = False
        self._is_cancelled = False

    @property
    def agent_id(self) -> str:
        """Id of the agent's instance."""
        return self._search.agent_id

    def __deepcopy__(self, memo: object) -> AgentHandle:
        return copy.copy(self)  # the search is shared

    def __repr__(self) -> str:
        return f"AgentHandle({self.agent_id})"


def spawn(agent: Agent, *arguments: object, **named: object) -> AgentHandle:
    """Start another agent, which runs concurrently. Its arguments are copied.

    It ends with the agent that spawned it, if not before.
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"spawn needs an agent, got {agent!r}: decorate the function with @agent")
    frame = current_frame()
    child = _child_id(frame, agent)

    def start(key: str) -> Search:
        _trace(frame, "spawn", child=child, name=agent.name)
        return _start(frame, State(agent, child, (arguments, named)), None)

    return AgentHandle(frame.once(f"spawn {child}", start))


def _child_id(frame: Frame, agent: Agent) -> str:
    """Return the id of the next agent that a frame spawns."""
    number = frame.num_spawned
    frame.num_spawned += 1
    state = frame.state
    name = f"{state.agent_id}/{agent.name}#{frame.prefix}{number}"
    is_first_path = not state.id.replace(".", "").strip("0")
    if is_first_path and frame.is_main:  # the main frame counts for all states
        return name
    return f"{name}@{state.id}"


def _id_after(frame: Frame, before: Search) -> str:
    """Return the id of a resumed agent. Each path resumes its own copy; ids do not depend on the order of paths."""
    state = frame.state
    owner = builtins.next((ancestor for ancestor in state.path if before in ancestor.searches), None)
    origin = before.task.result()
    number = 0  # of other resumptions from the same state on this path
    for ancestor in state.path:
        for search in ancestor.searches:
            if search is not before and search.origin is origin:
                number += 1
    if owner is not None and not number:
        path_since = state.id[len(owner.id) :]
        if not path_since.replace(".", "").strip("0"):
            return before.agent_id
    if owner is not None:
        branch = state.id
    else:
        branch = f"{state.agent_id}.{state.id}".replace("/", ".")
    parent, slash, name = before.agent_id.rpartition("/")
    resumed_id = f"{parent}{slash}{name.partition('@')[0]}@{branch}"
    if number:
        resumed_id += f"+{number}"
    return resumed_id


def _start(frame: Frame, origin: State, sent: object, agent_id: str | None = None) -> Search:
    parent = frame.execution.search
    search = Search(parent.runtime, origin, sent, agent_id, parent.starts_exclusive)
    frame.state.searches.append(search)
    return search


def _trace(frame: Frame, kind: str, **data: object) -> None:
    frame.execution.search.runtime.trace.add(frame.execution.agent_id, kind, frame.state.id, **data)


async def next(handle: AgentHandle) -> Any:
    """Wait for the next value that an agent yields or returns.

    If its last value has been read, this first continues the agent, like `resume(handle, None)`.

    Raises
    ------
    AgentEndedError
        If the agent ends without another value.
    AgentError
        If it fails.
    AgentCancelledError
        If it was canceled.
    """
    _check_live(handle)
    if handle._is_read:
        await resume(handle, None)
    search = handle._search

    async def wait(key: str, is_choice: bool) -> object:
        frame = current_frame()
        begin = search.runtime.trace.now()
        state = await search.wait()
        _trace(frame, "next", child=search.agent_id, begin=begin)
        if state.status == END and state.yielded is None and inspect.isasyncgenfunction(state.agent.function):
            raise AgentEndedError(f"agent {search.agent_id} has ended and yields nothing more")
        return state.yielded

    value = await perform(f"next {search.agent_id}", wait)
    handle._is_read = True
    return value


async def resume(handle: AgentHandle, value: object = None) -> None:
    """Send a value to an agent: its `yield` returns the value. Waits until the agent has yielded."""
    _check_live(handle)
    check_awaited(value, "the value that resume sends")
    if not handle._is_read:
        await next(handle)
    frame = current_frame()
    suspended = handle._search

    def start(key: str) -> Search | None:
        state = suspended.task.result()
        if state.status == END:
            return None
        _trace(frame, "resume", child=suspended.agent_id)
        return _start(frame, state, value, _id_after(frame, suspended))

    search = frame.once(f"resume {suspended.agent_id} {fingerprint(value)}", start)
    if search is None:
        raise AgentEndedError(f"agent {suspended.agent_id} has ended and cannot be resumed")
    handle._search = search
    handle._is_read = False


def _check_live(handle: object) -> None:
    if not isinstance(handle, AgentHandle):
        raise TypeError(f"next, resume and cancel need the handle that spawn returns, got {handle!r}")
    if handle._is_cancelled:
        raise AgentCancelledError(f"agent {handle.agent_id} was canceled")


def cancel(handle: AgentHandle) -> None:
    """End an agent and the agents that it spawned, and free the memory of their requests.

    If other paths of a search share the agent, it continues for them.
    """
    if isinstance(handle, AgentHandle) and handle._is_cancelled:
        return
    _check_live(handle)
    frame = current_frame()

    def close(key: str) -> None:
        if frame.execution.search.starts_exclusive or handle._search in frame.state.searches:
            handle._search.close()

    frame.once(f"cancel {handle.agent_id}", close)
    handle._is_cancelled = True


async def tool(
    function: Callable[..., T | Awaitable[T]], *arguments: object, timeout: float | None = None, **named: object
) -> T:
    """Call a function outside the agent's code. A replay returns the first result.

    Parameters
    ----------
    function : callable
        A coroutine function, or a function, which runs in its own thread. It cannot use `Chat`, `spawn` and the other
        operations of agents.
    timeout : float, optional
        Seconds after which the call fails. A function in a thread keeps running, and its result is ignored.

    Raises
    ------
    ToolError
        If the function failed; its cause is the error.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be positive, got {timeout!r}")
    name = getattr(function, "__name__", type(function).__name__)
    check_awaited((arguments, named), f"an argument of tool {name}")

    async def attempt() -> T:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        result = await in_thread(partial(function, *arguments, **named))
        return await result if inspect.isawaitable(result) else result

    async def call() -> T:
        task = outside_of_agents(attempt())
        try:
            done, _ = await asyncio.wait([task], timeout=timeout)
        finally:
            task.cancel()
        if not done:
            raise ToolError(f"tool {name} failed: took more than {timeout} seconds")
        if task.cancelled():
            raise ToolError(f"tool {name} failed: it was canceled")
        cause = task.exception()
        if cause is not None:
            raise ToolError(f"tool {name} failed: {cause!r}") from cause
        return task.result()

    async def run(key: str, is_choice: bool) -> T:
        frame = current_frame()
        runtime = frame.execution.search.runtime
        runtime.stats.tool_calls += 1
        begin = runtime.trace.now()
        error: str | None = None
        result: T | None = None
        try:
            operation = f"tool {name} {digest(arguments, named)}"
            result = await runtime.journaled(frame.execution.agent_id, key, operation, call)
            return result
        except ToolError as failure:
            error = str(failure)
            raise
        finally:
            _trace(frame, "tool", begin=begin, name=name, result=repr(result)[:MAX_SHOWN], error=error)

    return await perform(f"tool {name} {fingerprint(arguments)} {fingerprint(named)}", run)


async def gather(*awaitables: Awaitable[T]) -> list[T]:
    """Run operations concurrently, such as several `Chat.gen`, and return their results in order.

    Replaces `asyncio.gather`. Completions inside it are part of the running transition, not choices.
    """
    frame = current_frame()
    operation = frame.place
    frame.once(f"gather {len(awaitables)}", lambda key: None)
    tasks = []
    for index, awaitable in enumerate(awaitables):
        child = Frame(frame.execution, f"{operation}.{index}.")
        tasks.append(asyncio.get_running_loop().create_task(child.run(awaitable)))
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def now() -> float:
    """Return the time in seconds since the epoch. A replay returns the first time."""
    execution = current_frame().execution
    runtime = execution.search.runtime
    return float(current_frame().once("now", lambda key: runtime.now(execution.agent_id, key)))


def rng() -> random.Random:
    """Return a random number generator, seeded by the run's seed and the place in the agent."""
    frame = current_frame()
    runtime_seed = frame.execution.search.runtime.seed
    seed = frame.once("rng", lambda key: derive_seed(runtime_seed, key))
    return random.Random(seed)
