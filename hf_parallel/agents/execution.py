"""Execution: an agent's coroutine, which runs from choice to choice or replays a log."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from hf_parallel.agents.errors import ReplayError
from hf_parallel.agents.state import CHOICE, END, ERROR, YIELD, Entry, State, check_awaited
from hf_parallel.generation.prompts import Message

T = TypeVar("T")

_frame: ContextVar[Frame | None] = ContextVar("hf_parallel_agent_frame", default=None)


class Context:
    """Context of operations: an `Execution`, or a state that a value function evaluates, which has no choices."""

    is_running = True
    """Whether a transition or a replay is running and has not been canceled."""

    def __init__(self, search: Any, state: State) -> None:
        self.search = search
        self.agent_id = state.agent_id
        self.state: State | None = state


class Frame:
    """A task of an agent, whose operations are recorded in the present state, or replayed.

    `prefix` distinguishes its operations; the agent's own coroutine has no prefix.
    """

    def __init__(self, execution: Context, prefix: str = "") -> None:
        self.execution = execution
        self.prefix = prefix
        self.num_operations = 0  # in the present state
        self.num_spawned = 0
        self.task: asyncio.Task[object] | None = None

    @property
    def is_main(self) -> bool:
        """Whether it is the agent's own coroutine, whose choices become states."""
        return not self.prefix

    @property
    def state(self) -> State:
        """State that is being computed or replayed."""
        state = self.execution.state
        if state is None:
            raise self.departure("the recorded operations have ended")
        return state

    @property
    def place(self) -> str:
        """Id of the next operation in the state."""
        return f"{self.prefix}{self.num_operations}"

    def key(self) -> str:
        """Return an id of the next operation, the same in every run with the same seed."""
        return f"{self.state.agent_id}/{self.state.id}/{self.place}"

    def recorded(self, operation: str) -> Entry | None:
        """Return the recorded entry of the next operation; None if it is new."""
        entry = self.state.entries.get(self.place)
        execution = self.execution
        if entry is None and isinstance(execution, Execution) and execution.is_replaying and self.is_main:
            execution.next_state()
            entry = None if execution.state is None else execution.state.entries.get(self.place)
        if entry is None:
            return None
        if entry.operation != operation:
            raise self.departure(f"{entry.operation!r} was recorded, {operation!r} is called")
        self.num_operations += 1
        return entry

    def record(self, operation: str, value: object = None) -> Entry:
        """Add the next operation to the log."""
        entry = self.state.entries[self.place] = Entry(operation, value)
        self.num_operations += 1
        return entry

    def once(self, operation: str, compute: Callable[[str], object]) -> Any:
        """Return the value of an operation without an `await`: recorded, or computed from the operation's key."""
        entry = self.recorded(operation)
        return (self.record(operation, compute(self.key())) if entry is None else entry).value

    def departure(self, what: str) -> ReplayError:
        """End the run because the agent is not deterministic, even if it catches the error; return the error."""
        execution = self.execution
        error = ReplayError(
            f"agent {execution.agent_id} departs from its log when it is replayed: {what}. Its code must do the "
            "same each time: use now(), rng() and tool() for what changes"
        )
        if execution.is_running:  # clean-up code after the end or a cancellation is not replayed, and ends nothing
            execution.search.runtime.end(execution.agent_id, error)
        return error

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Await an awaitable in this frame. The caller makes a task of it."""
        self.task = asyncio.current_task()
        token = _frame.set(self)
        try:
            return await awaitable
        finally:
            _frame.reset(token)


def current_frame() -> Frame:
    """Return the frame of the running agent; raise `RuntimeError` outside an agent."""
    frame = _frame.get()
    if frame is None:
        raise RuntimeError("this function works only in an agent that a Runtime runs, and not within a tool")
    if frame.task is not asyncio.current_task():
        raise RuntimeError("an agent's tasks must be made by gather of hf_parallel.agents, not by asyncio")
    return frame


async def perform(
    operation: str, compute: Callable[[str, bool], Awaitable[T]], messages: Sequence[Message] | None = None
) -> T:
    """Run an operation of the running agent, or replay it.

    Parameters
    ----------
    operation : str
        Name and arguments of the operation, the same in every replay.
    compute : coroutine function
        Receives the operation's key, and whether it is a choice. Returns the result.
    messages : list of dict, optional
        Makes the operation a choice: the conversation to continue.
    """
    frame = current_frame()
    entry = frame.recorded(operation)
    if entry is None:
        is_choice = False  # not in a value function or `gather`
        if messages is not None and frame.is_main and isinstance(frame.execution, Execution):
            await frame.execution.suspend(CHOICE, operation, messages)
            is_choice = True
        key = frame.key()
        entry = frame.record(operation)
        try:
            entry.value = await compute(key, is_choice)
        except Exception as error:
            entry.error = error
        except asyncio.CancelledError as error:
            entry.error = error
            raise
    elif isinstance(entry.error, asyncio.CancelledError):
        if frame.is_main:
            raise frame.departure("an operation was canceled, as by asyncio.timeout, which cannot be replayed")
        await asyncio.get_running_loop().create_future()  # until `gather` cancels it again
    return entry.result()


def outside_of_agents(awaitable: Coroutine[object, None, T]) -> asyncio.Task[T]:
    """Start a task that is not part of an agent."""
    token = _frame.set(None)
    try:
        return asyncio.get_running_loop().create_task(awaitable)
    finally:
        _frame.reset(token)


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a daemon thread, which does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def end(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def work() -> None:
        try:
            outcome = partial(done.set_result, function())
        except BaseException as error:
            raised = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            outcome = partial(done.set_exception, raised)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, outcome)

    threading.Thread(target=work, name="hf_parallel-tool", daemon=True).start()
    return await done


async def run_aside(context: Context, awaitable: Coroutine[object, None, T]) -> T:
    """Await a value function, which is not part of the agent and not replayed."""
    frame = Frame(context, "value.")
    try:
        return await asyncio.get_running_loop().create_task(frame.run(awaitable))
    finally:
        awaitable.close()  # if it was canceled before it began


class Execution(Context):
    """Coroutine of an agent. `state` is the state being computed or replayed, None during suspension."""

    is_replaying = False

    def __init__(self, search: Any, state: State) -> None:
        super().__init__(search, state)
        self._path = deque(state.path)
        self._stopped: asyncio.Future[tuple[str, str, Any]]
        self.frame = Frame(self)
        self._begin()
        self._go = asyncio.get_running_loop().create_future()
        running = self.frame.run(self._run(state, self._go))
        self.task = asyncio.get_running_loop().create_task(running)
        self._runtime = search.runtime
        self._runtime.executions.add(self)
        self.task.add_done_callback(self._done)

    def _begin(self) -> None:
        self.is_running = False
        self._stopped = asyncio.get_running_loop().create_future()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._runtime.executions.discard(self)
        if not self._stopped.done():
            self._stopped.cancel()

    async def _run(self, state: State, go: asyncio.Future[object]) -> None:
        function = state.agent.function
        try:
            await go
            check_awaited(state.arguments, "an argument of the agent")
            arguments, named = copy.deepcopy(state.arguments)
            if inspect.iscoroutinefunction(function):
                value = await function(*arguments, **named)
                check_awaited(value, "the returned value")
                self._stop(END, "", value)
                return
            generator = function(*arguments, **named)
            try:
                await self._generate(generator)
            finally:
                await generator.aclose()
        except Exception as error:
            self._stop(ERROR, "", error)

    async def _generate(self, generator: AsyncGenerator[object, object]) -> None:
        sent: object = None
        while True:
            try:
                value = await generator.asend(sent)
            except StopAsyncIteration:
                self._stop(END, "", None)
                return
            check_awaited(value, "the yielded value")
            entry = self.frame.recorded("yield")
            if entry is None:
                sent = await self.suspend(YIELD, "yield", copy.deepcopy(value))
                self.frame.record("yield", sent)
            else:
                sent = entry.value
            sent = copy.deepcopy(sent)

    def _stop(self, status: str, operation: str, value: object) -> None:
        if not self._stopped.done():
            self._stopped.set_result((status, operation, value))

    async def suspend(self, status: str, operation: str, value: object) -> object:
        """Wait until a supervisor continues the state; return what it sends to a yield."""
        self._go = asyncio.get_running_loop().create_future()
        self._stop(status, operation, value)
        return await self._go

    async def advance(self, child: State, sent: object = None) -> None:
        """Continue to the next choice, yield or end, which becomes the state `child`."""
        self._path = deque([child])
        self.next_state()
        await self._continue(sent)
        self.state = None
        status, operation, value = self._stopped.result()
        self._begin()
        child.status = status
        child.pending = operation
        if status == CHOICE:
            child.messages = value
        elif status == ERROR:
            child.error = value
        else:
            child.yielded = value
        if status in (CHOICE, YIELD):
            child.execution = self

    async def replay(self, state: State) -> None:
        """Run to a state by replaying its log."""
        self.is_replaying = True
        self.next_state()
        await self._continue(None)
        self.is_replaying = False
        status, operation, value = self._stopped.result()
        is_same = status == state.status and operation == state.pending
        if not is_same or self.state is not None:
            error = self.frame.departure(f"{state.pending!r} was recorded, {operation or status!r} is reached")
            raise error from (value if status == ERROR else None)
        self._begin()

    def next_state(self) -> None:
        """Move to the next state of the path; None at its end."""
        self.state = self._path.popleft() if self._path else None
        self.frame.num_operations = 0

    async def _continue(self, sent: object) -> None:
        if self._go.done():  # the coroutine was closed
            raise asyncio.CancelledError
        self.is_running = True
        self._go.set_result(sent)
        try:
            await asyncio.shield(self._stopped)
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """End the coroutine."""
        self.is_running = False
        self.task.cancel()
