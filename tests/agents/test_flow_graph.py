"""Flow graphs of agents: states are the suspension points, edges follow the control flow."""

from __future__ import annotations

import functools
from typing import Any

import agent_functions
import pytest

from hf_parallel.agents.drawing.flow_graph import FlowState, flow_graph


def edges(function: Any) -> set[str]:
    """Return the edges of a function's flow graph as `begin > end`."""
    return {f"{begin} > {end}" for begin, end in flow_graph(function).edges}


def paths(*chains: str) -> set[str]:
    """Return the edges of chains such as `a > b > c`."""
    states = [chain.split(" > ") for chain in chains]
    return {f"{begin} > {end}" for chain in states for begin, end in zip(chain, chain[1:], strict=False)}


def test_the_agents_of_the_paper_have_the_states_and_edges_of_its_figure() -> None:
    repair, gather = flow_graph(agent_functions.bug_repair), flow_graph(agent_functions.context_gather)
    first = repair.states[0].line
    assert repair.states == (
        FlowState("start", "start", first, "bug_repair(bug)"),
        FlowState("spawn", "spawn", first + 2, "spawn(context_gather, bug)"),
        FlowState("next", "next", first + 4, "next(gather)"),
        FlowState("gen", "gen", first + 5, "chat.gen(code)", forkable=True),
        FlowState("resume", "resume", first + 6, "resume(gather, patch)"),
        FlowState("end", "end", first + 8, "end"),
    )
    assert edges(agent_functions.bug_repair) == paths("start > spawn > next > gen > resume > end", "resume > next")
    assert [state.name for state in gather.states] == ["start", "yield", "end"]
    assert edges(agent_functions.context_gather) == paths("start > yield > yield")


def test_calls_make_states_of_their_kinds_in_the_order_of_evaluation() -> None:
    flow = flow_graph(agent_functions.calls)
    assert [(state.name, state.kind, state.forkable) for state in flow.states[1:-1]] == [
        ("count", "tool", False),
        ("gen", "gen", True),
        ("gen 2", "gen", False),
        ("gather", "tool", False),
        ("spawn", "spawn", False),
        ("next", "next", False),
        ("resume", "resume", False),
        ("key", "tool", False),
        ("value", "tool", False),
        ("search", "tool", False),
        ("tool", "tool", False),
    ]
    names = [state.name for state in flow.states]
    assert flow.edges == tuple(zip(names, names[1:], strict=False))


def test_branches_join() -> None:
    assert edges(agent_functions.branches) == paths(
        "start > test > yes > left > second > third > subject",
        *("test > maybe > left", "test > left", "test > right > second", "yes > right", "maybe > right"),
        *("left > third", "right > third", "left > subject", "right > subject", "second > subject"),
        *("subject > guard > one > last > end", "subject > other > last", "subject > end"),
        *("guard > other", "guard > end"),
    )


def test_loops_return_and_leave() -> None:
    assert edges(agent_functions.loops) == paths(
        "start > listed > found > found > missing > more > async for > use > async for > more > end",
        *("listed > missing", "found > more"),
    )


def test_comprehensions_are_loops() -> None:
    assert edges(agent_functions.comprehensions) == paths(
        "start > async for > good > f > async for > g > g > end", "good > async for > end"
    )


def test_suspension_points_within_try_lead_to_handlers_and_finally() -> None:
    assert edges(agent_functions.exceptions) == paths(
        "start > body > check > fine > close > after > end",
        *(
            "body > late > close > end",
            "check > late",
            "body > close",
            "check > close",
            "start > late",
            "start > close",
        ),
    )
    assert edges(agent_functions.plain_code_raises) == paths("start > use > ask > end", "start > ask", "use > end")


def test_unreachable_code_is_left_out() -> None:
    assert edges(agent_functions.returns_through) == paths("start > async with > work > end")


NO_SOURCE: dict[str, Any] = {}
exec("async def unknown():\n    yield 1", NO_SOURCE)


@pytest.mark.parametrize("function", [len, NO_SOURCE["unknown"], functools.partial(print), 3])
def test_a_function_without_source_raises(function: Any) -> None:
    with pytest.raises(ValueError, match="the source of .* is not available"):
        flow_graph(function)


def test_a_flow_graph_is_mermaid_text_without_markup_of_the_source() -> None:
    lines = flow_graph(agent_functions.bug_repair).mermaid().splitlines()
    assert lines[0] == "flowchart TD"
    assert sum(line.endswith(":::fork") for line in lines) == 1
    assert sum(" --> " in line for line in lines) == 6
    text = flow_graph(agent_functions.hostile).mermaid()
    assert not {"<", "&", chr(0)} & set(text)
    assert text.count('"') == 2 * 3, "each of the three labels is quoted"
