"""Search: one search of a supervisor, from the agent's start or a yield to its next yield or end."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from hf_parallel.agents.errors import AgentCancelledError, AgentError, BudgetExceededError, agent_failure
from hf_parallel.agents.execution import Context, Execution, run_aside
from hf_parallel.agents.state import YIELD, State
from hf_parallel.agents.supervisors.base import Supervisor


class Search:
    """A running search; its `task` returns the final state.

    `origin` is the first state of a new agent, or a state at a yield, which receives `sent`. A copy of an agent has its
    own `agent_id`. `is_exclusive`: the agent has no copies, because no supervisor above it continues a state twice.
    """

    def __init__(
        self, runtime: Any, origin: State, sent: object = None, agent_id: str | None = None, is_exclusive: bool = True
    ) -> None:
        self.runtime = runtime
        self.origin = origin
        self.sent = sent
        self.is_exclusive = is_exclusive
        self.agent_id = agent_id or origin.agent_id
        runtime.stats.agents += origin.status != YIELD
        self._states: list[State] = []
        self._final: State | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())
        runtime.search_tasks.add(self.task)
        self.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[State]) -> None:
        self.runtime.search_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it may have no reader

    async def wait(self) -> State:
        """Wait for the final state."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise AgentCancelledError(f"agent {self.agent_id} was canceled")
        return self.task.result()

    @property
    def starts_exclusive(self) -> bool:
        """Whether the agents that this one starts belong to a single path."""
        cls = type(self.origin.agent.supervisor)
        return self.is_exclusive and vars(cls).get("continues_once", False)

    def close(self) -> None:
        """Cancel the search and all agents that it started."""
        self.task.cancel()
        self._drop(self._all_states(), ())

    def _all_states(self) -> list[State]:
        """Return the states of the search and, unless the agent has copies, all earlier states."""
        return [*self._states, *(self.origin.path if self.is_exclusive else ())]

    async def _run(self) -> State:
        try:
            root = await self._first()
            self._final = await self._explore(root) if root.is_choice else root
        except asyncio.CancelledError:
            self.runtime.trace.add(self.agent_id, "cancel")
            raise
        except Exception as error:
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            final = self._final
            if final is not None and final.status == YIELD:
                self._drop(self._states, final.path)
            else:
                self._drop(self._all_states(), ())
        if final.error is not None:
            raise self._failure(final.error)
        self.runtime.trace.add(self.agent_id, final.status, final.id, value=repr(final.yielded))
        return final

    def _failure(self, error: BaseException) -> AgentError:
        self.runtime.trace.add(self.agent_id, "error", error=f"{type(error).__name__}: {error}")
        if isinstance(error, AgentError):
            return error  # of an agent that it has waited for
        return agent_failure(self.agent_id, error)

    async def _first(self) -> State:
        """Run the code before the first choice."""
        if self.origin.status != YIELD:
            self._states.append(self.origin)
            await Execution(self, self.origin).advance(self.origin)
            return self.origin
        child = self._child(self.origin)
        child.id = f"{self.origin.id}.0"  # of each copy
        child.sent = self.sent
        await (await self._execution(self.origin)).advance(child, self.sent)
        return child

    def _child(self, state: State) -> State:
        child = State(state.agent, self.agent_id, state.arguments, state)
        self._states.append(child)
        return child

    async def _execution(self, state: State) -> Execution:
        """Return the coroutine suspended in a state, or a new one that has replayed its log."""
        execution = state.execution
        state.execution = None
        if execution is None:
            execution = Execution(self, state)
            await execution.replay(state)
        execution.search = self
        execution.agent_id = self.agent_id
        return execution

    async def _explore(self, root: State) -> State:
        supervisor = copy.copy(root.agent.supervisor)
        supervisor.init(root)
        running: deque[tuple[State, State, asyncio.Task[None]]] = deque()
        limits = {"max_tokens": supervisor.max_tokens, "max_passes": supervisor.max_passes}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        used = {"max_tokens": 0.0, "max_passes": 0.0}
        passes = self.runtime.model.passes
        try:
            while True:
                used["max_passes"] = self.runtime.model.passes - passes
                is_used_up = any(used[name] >= limit for name, limit in limits.items())
                if not is_used_up:
                    for state in supervisor.select():
                        child = self._child(state)
                        task = asyncio.get_running_loop().create_task(self._continue(state, child, supervisor))
                        running.append((state, child, task))
                if not running:
                    break
                parent, child, task = running[0]  # removed afterward: it is canceled with the others
                await asyncio.wait([task])
                running.popleft()
                task.result()
                used["max_tokens"] += child.tokens
                self._note(child, "committed")
                supervisor.commit(parent, child)
        finally:
            for _, _, task in running:
                task.cancel()
        final = supervisor.result()
        if final is None:
            is_cut = is_used_up and any(state.is_choice and not state.num_children for state in self._states)
            failed = next((state for state in self._states if state.error is not None), None)
            if failed is not None and not is_cut:
                return failed
            budget = ", ".join(f"{name}={limit}" for name, limit in limits.items())
            raise BudgetExceededError(f"the search of agent {self.agent_id} has ended before a path has: {budget}")
        self._note(final, "selected")
        return final

    async def _continue(self, state: State, child: State, supervisor: Supervisor) -> None:
        """Compute a transition."""
        execution = await self._execution(state)
        await execution.advance(child)
        self.runtime.stats.transitions += 1
        if supervisor.value is not None and child.error is None and supervisor.evaluates(child):
            child.value = await run_aside(Context(execution.search, child), _value(supervisor, child))

    def _note(self, state: State, status: str) -> None:
        parent = None if state.parent is None else state.parent.id
        self.runtime.trace.add(
            self.agent_id, "state", state.id, parent=parent, value=state.value, status=status, reached=state.status
        )

    def _drop(self, states: Sequence[State], kept: Sequence[State]) -> None:
        """Close the coroutines of states that are not kept, and the agents started in them."""
        for state in states:
            if state in kept:
                continue
            if state.execution is not None:
                state.execution.close()
                state.execution = None
            for search in state.searches:
                search.close()


async def _value(supervisor: Supervisor, state: State) -> float:
    """Return the value that a supervisor's function gives a state."""
    assert supervisor.value is not None
    result = supervisor.value(state)
    if inspect.isawaitable(result):
        result = await result
    if not hasattr(result, "__float__"):
        raise TypeError(f"the value function must return a number, got {result!r}")
    value = float(result)
    if not math.isfinite(value):
        raise ValueError(f"the value of {state!r} must be a finite number, got {value!r}")
    return value
