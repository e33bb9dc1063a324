"""The graph of a run: agents, messages and search trees are drawn, and the visits of states and edges are counted."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import agent_functions
from agent_traces import HOSTILE, large_trace, repair_trace, texts

from hf_parallel.agents import (
    AgentResult,
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
from hf_parallel.agents.drawing.flow_graph import flow_graph
from hf_parallel.agents.drawing.run_graph import MAX_STATES, graph, run_graph, visits


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


def run(one: Any) -> tuple[AgentResult, Counter[Any]]:
    """Run an agent on a model that counts its completions. Return the result, and the visits of its function."""
    numbers = itertools.count(1)
    model = ScriptedModel(lambda messages, settings, seed: str(numbers.__next__()))
    result = Runtime(model).run(one, "bug")
    return result, visits(result.trace, one.name, flow_graph(one))


def test_visits_of_a_run_are_counted_at_states_and_edges() -> None:
    result, found = run(repair)
    assert found == {
        **{"start": 1, "spawn": 1, "next": 3, "gen": 3, "resume": 3, "end": 1},
        **{("start", "spawn"): 1, ("spawn", "next"): 1, ("next", "gen"): 3, ("gen", "resume"): 3},
        **{("resume", "next"): 2, ("resume", "end"): 1},
    }
    other = visits(result.trace, "gather_code", flow_graph(gather_code))
    assert (other["look_up"], other["start", "look_up"]) == (4, 1)
    assert other["look_up", "yield"] in (3, 4)  # it ends with the agent that has spawned it
    assert {"3 times", "2"} <= set(texts(result.graph))


def test_visits_of_all_paths_of_a_search_are_counted_without_those_of_value_functions_and_helpers() -> None:
    result, found = run(solve)
    assert result.stats.completions == 3 * 8, "seven of a path, and one of its value"
    assert found == {
        **{"start": 1, "gen": 3, "gen 2": 3, "gen 5": 3, "yield": 1, "end": 1},
        **{("start", "gen"): 3, ("gen", "gen 2"): 3, ("gen 5", "yield"): 1, ("yield", "end"): 1},
    }


def test_the_graph_of_a_run_shows_agents_messages_states_and_counts() -> None:
    functions = {"bug_repair": agent_functions.bug_repair, "context_gather": agent_functions.context_gather, "len": len}
    shown = texts(graph(repair_trace(), functions))
    assert {"bug_repair", "1 instance, 4 generations, 12 tokens", "1 instance, 2 tool calls"} <= set(shown)
    assert {"spawn 1, next 2, resume 2", "yield 2"} <= set(shown)
    assert {"States of bug_repair#0", "0", "0.0", "0.1", "0.0.0", "0.1.1", "1.5"} <= set(shown)
    assert {"Flow graph of bug_repair", "Flow graph of context_gather"} <= set(shown)
    assert shown[-1].startswith("the source of len is not available")


def test_names_and_states_of_a_run_are_escaped() -> None:
    trace = RunTrace()
    trace.add(HOSTILE, "spawn", child=f"{HOSTILE}/x#0", name=HOSTILE)
    trace.add(f"{HOSTILE}/x#0", "yield", value=HOSTILE)
    trace.add(HOSTILE, "state", HOSTILE, parent=None, value=float("nan"), status="dropped")
    trace.add(HOSTILE, "state", "1", parent=HOSTILE, value=float("-inf"), status="selected")
    trace.add(HOSTILE, "state", HOSTILE, parent="1", value=1.0, status="dropped")
    shown = texts(run_graph(trace))
    assert any("<script>" in text for text in shown)


def test_a_large_run_is_drawn_quickly_with_a_limit_on_states() -> None:
    trace, begin = large_trace(agents=40, rounds=12), time.process_time()
    assert len(trace.events) > 2000
    shown = texts(run_graph(trace))
    assert time.process_time() - begin < 5
    assert shown[-1] == f"{40 * 13 - MAX_STATES // 13 * 13} more states are not drawn."


def test_an_empty_run_has_a_graph() -> None:
    assert texts(run_graph(RunTrace())) == ["Agents"]
