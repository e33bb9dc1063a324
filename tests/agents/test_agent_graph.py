"""The graph of a run shows agents, messages, search trees and flow graphs with the visits of their states."""

from __future__ import annotations

import itertools
import re
from typing import Any

from agent_traces import HOSTILE, large_trace

from hf_parallel.agents import (
    BestOfN,
    Chat,
    Runtime,
    RunTrace,
    ScriptedModel,
    State,
    agent,
    gather,
    next,
    resume,
    spawn,
    tool,
)
from hf_parallel.agents.drawing.run_graph import MAX_STATES, run_graph


async def look_up(bug: str) -> str:
    return f"code of {bug}"


@agent
async def repair(bug: str) -> Any:
    gathering = spawn(gather_code, bug)
    while True:
        code = await next(gathering)
        patch = await Chat().user(code).gen()
        await resume(gathering, patch)
        if patch == "3":
            return patch


@agent
async def gather_code(bug: str) -> Any:
    while True:
        code = await tool(look_up, bug)
        yield code


async def judge(state: State) -> float:
    return float(await Chat().user(state.text).gen())


async def ask_twice(chat: Chat) -> str:
    return await chat.gen() + await chat.gen(forkable=False)


@agent(supervisor=BestOfN(3, value=judge), name="solver")
async def solve(question: str) -> Any:
    chat = Chat().user(question)
    await chat.gen(), await chat.gen()
    await ask_twice(chat)
    await gather(chat.gen(), chat.gen())
    await chat.gen(forkable=False)
    yield len(chat.messages)


def labels(graph: str) -> list[str]:
    """Return the texts of a graph."""
    return re.findall(r'"([^"]*)"', graph)


def test_visits_are_counted_at_the_states_of_the_source() -> None:
    numbers = itertools.count(1)
    result = Runtime(ScriptedModel(lambda *given: str(numbers.__next__()))).run(repair, "bug")
    shown = " ".join(labels(result.graph))
    for call in ("gen()", "resume(gathering, patch)", "next(gathering)"):
        assert f"{call}<br>3 times" in shown


def test_visits_of_a_search_leave_out_value_functions_and_helpers() -> None:
    numbers = itertools.count(1)
    result = Runtime(ScriptedModel(lambda *given: str(numbers.__next__()))).run(solve, "bug")
    assert result.stats.completions == 3 * 8, "seven of a path, and one of its value"
    calls = [label for label in labels(result.graph) if "chat.gen(" in label and "gather" not in label]
    assert [label.partition("<br>")[2] for label in calls] == ["6 times", "6 times", "", "", "3 times"]


def test_names_and_states_have_no_markup() -> None:
    trace = RunTrace()
    trace.add(HOSTILE, "spawn", child=f"{HOSTILE}/x#0", name=HOSTILE)
    trace.add(f"{HOSTILE}/x#0", "yield", value=HOSTILE)
    trace.add(HOSTILE, "state", HOSTILE, parent=None, value=float("nan"), status="dropped")
    trace.add(HOSTILE, "state", "1", parent=HOSTILE, value=float("-inf"), status="selected")
    graph = run_graph(trace)
    assert "<" not in graph.replace("<br>", "")
    assert not {"\x00", "\ud800"} & set(graph)
    assert all(line.count('"') in (0, 2) for line in graph.splitlines())


def test_a_graph_has_a_limited_number_of_states_and_may_be_empty() -> None:
    omitted = 40 * 13 - MAX_STATES // 13 * 13
    assert labels(run_graph(large_trace(agents=40, rounds=12)))[-1] == f"{omitted} more states not drawn"
    assert labels(run_graph(RunTrace())) == ["Agents"]
