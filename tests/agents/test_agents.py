"""Agents: what they exchange, how they fail and end, and that a state continues several times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from scripted_model import ScriptedModel

from hf_parallel.agents import (
    AgentCancelledError,
    AgentEndedError,
    AgentError,
    BestOfN,
    Chat,
    ReplayError,
    Runtime,
    State,
    ToolError,
    agent,
    cancel,
    gather,
    next,
    now,
    resume,
    rng,
    spawn,
    tool,
)


def echo(messages: Sequence[Any], settings: Any, seed: int) -> str:
    """Return the last message and a digit that depends on the seed."""
    return f"{messages[-1]['content']}{seed % 10}"


def scripted() -> Runtime:
    return Runtime(ScriptedModel(echo))


class Paths(BestOfN):
    """Takes the last path."""

    def result(self) -> State | None:
        return [state for state in self.states if state.is_final][-1]


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    while not condition():
        await asyncio.sleep(0.001)


async def forever() -> None:
    await asyncio.Event().wait()


@agent
async def counter(first: int) -> Any:
    number = first
    while True:
        sent = yield number
        if sent == "stop":
            return
        number += 1 if sent is None else sent


def test_a_run_returns_the_values_that_the_agent_yields() -> None:
    @agent
    async def two() -> Any:
        yield 1
        yield 2

    @agent
    async def returned(value: int) -> int:
        return value + 1

    result = scripted().run(two)
    assert (result.value, result.values) == (2, [1, 2])
    assert scripted().run(returned, 4).value == 5


def test_agents_exchange_values() -> None:
    @agent
    async def asks() -> Any:
        handle = spawn(counter, 10)
        values = [await next(handle)]
        await resume(handle, 5)
        values.append(await next(handle))
        values.append(await next(handle))  # continues by itself
        await resume(handle, "stop")
        with pytest.raises(AgentEndedError, match="asks#0/counter#0 has ended"):
            await next(handle)
        yield values

    assert scripted().run(asks).value == [10, 15, 16]


def test_an_error_reaches_the_agents_that_wait() -> None:
    @agent
    async def fails() -> Any:
        raise KeyError("gone")
        yield

    @agent
    async def waits() -> Any:
        yield await next(spawn(fails))

    @agent
    async def catches() -> Any:
        try:
            await next(spawn(waits))
        except AgentError as error:
            yield str(error)

    with pytest.raises(AgentError, match="waits#0/fails#0 failed: KeyError: 'gone'") as caught:
        scripted().run(waits)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "waits#0/fails#0 failed" in scripted().run(catches).value


def test_a_canceled_agent_ends_with_those_that_it_has_spawned() -> None:
    begun, ended = [], []

    async def never() -> None:
        begun.append(True)
        try:
            await forever()
        finally:
            ended.append(True)

    @agent
    async def sleeps() -> Any:
        yield await tool(never)

    @agent
    async def between() -> Any:
        yield await next(spawn(sleeps))

    @agent
    async def cancels() -> Any:
        handle = spawn(between)
        await tool(until, lambda: begun)
        cancel(handle)
        with pytest.raises(AgentCancelledError, match="cancels#0/between#0 was canceled"):
            await next(handle)
        await tool(until, lambda: ended)

    scripted().run(cancels)
    assert ended == [True]


def test_a_state_continues_several_times_with_what_it_received() -> None:
    starts = []

    async def look(text: str) -> list[str]:
        starts.append(text)
        return [text]

    times: list[float] = []

    @agent(supervisor=Paths(3))
    async def chooses(words: list[str]) -> Any:
        words.append("x")  # the agent's own copy
        times.append(now())
        found = await tool(look, "once")
        found.append(rng().random())
        chat = Chat()
        chat.user(f"{len(words)}")
        first = await chat.gen()
        second = await chat.gen()
        yield first, second, found, [message["content"] for message in chat.messages]

    words = ["a"]
    result = scripted().run(chooses, words)
    first, second, found, contents = result.value
    assert words == ["a"]
    assert starts == ["once"], "the tool is called once, its result replayed"
    assert len(times) > 1 == len(set(times))
    assert contents == ["2", first, second]
    assert len(found) == 2
    assert first != second
    assert result.stats.transitions == 6
    assert result.stats.completions == 6
    assert scripted().run(chooses, words).value == result.value
    assert Runtime(ScriptedModel(echo), seed=1).run(chooses, words).value != result.value


def test_an_agent_that_catches_all_errors_cannot_hide_a_departure_from_its_log() -> None:
    calls = []

    @agent(supervisor=Paths(2))
    async def changes() -> Any:
        calls.append(1)
        for _ in range(2):
            with suppress(Exception):
                await Chat().user(f"question {len(calls)}").gen()
        return "hidden"

    @agent
    async def waits() -> Any:
        with suppress(Exception):
            await next(spawn(changes))
        return "hidden, too"

    for one in (changes, waits):
        calls.clear()
        with pytest.raises(AgentError, match="changes#0 departs from its log") as caught:
            scripted().run(one)
        assert isinstance(caught.value.__cause__, ReplayError)


def test_tools_fail_and_time_out() -> None:
    @agent
    async def uses() -> Any:
        with pytest.raises(ToolError, match="tool forever failed: took more than 0.01 seconds"):
            await tool(forever, timeout=0.01)
        found = await tool(len, [1, 2])  # in a thread
        with pytest.raises(ToolError, match="ZeroDivisionError"):
            await tool(divmod, 1, 0)
        yield found

    result = scripted().run(uses)
    assert result.value == 2
    assert result.stats.tool_calls == 3


def test_gather_runs_operations_at_the_same_time_and_replays_them() -> None:
    running: list[int] = []

    async def work(number: int) -> int:
        running.append(number)
        await until(lambda: len(running) % 5 == 0)  # all of a run at once
        return number

    @agent(supervisor=Paths(3))
    async def gathers() -> Any:
        chat = Chat()
        chat.user("q")
        forks = chat.fork(3)
        texts = await gather(*(fork.gen() for fork in forks))
        numbers = await gather(*(tool(work, number) for number in range(5)))
        assert [fork.messages[-1]["content"] for fork in forks] == texts
        yield texts, numbers, await chat.gen()

    result = scripted().run(gathers)
    texts, numbers, last = result.value
    assert numbers == [0, 1, 2, 3, 4]
    assert len(running) == 5, "the tools are called once"
    assert len(set(texts)) > 1
    assert last.startswith("q")
    assert all(scripted().run(gathers).value == result.value for _ in range(3))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_forgotten_await_is_named() -> None:
    @agent
    async def yields() -> Any:
        yield {"answer": [Chat().user("q").gen()]}

    @agent
    async def returns() -> Any:
        return Chat().user("q").gen()

    @agent
    async def gives() -> Any:
        return await tool(len, Chat().user("q").gen())

    @agent
    async def spawns() -> Any:
        return await next(spawn(counter, Chat().user("q").gen()))

    for one, what in {
        yields: "the yielded value",
        returns: "the returned value",
        gives: "an argument of tool len",
        spawns: "an argument of the agent",
    }.items():
        with pytest.raises(AgentError) as caught:
            scripted().run(one)
        assert f"{what} is a coroutine, Chat.gen(...): is an await missing?" in str(caught.value)
