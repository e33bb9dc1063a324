"""Flow graphs of agents: states are the suspension points, edges follow the control flow, drawings are XML."""

from __future__ import annotations

import functools
import itertools
import random
import re
from pathlib import Path
from typing import Any

import agent_functions
import pytest
from agent_traces import texts

from hf_parallel.agents.drawing.flow_graph import FlowGraph, FlowState, flow_graph


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


def test_the_line_of_a_state_is_the_line_of_its_file() -> None:
    lines = Path(agent_functions.__file__).read_text(encoding="utf-8").splitlines()
    for function in (agent_functions.bug_repair, agent_functions.Tools.look, agent_functions.decorated):
        for state in flow_graph(function).states[1:-1]:
            assert state.call in lines[state.line - 1]


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


def test_exceptions_lead_from_suspension_points_to_what_handles_them() -> None:
    assert edges(agent_functions.exceptions) == paths(
        "start > body > check > fine > close > after > end",
        *("body > late > close > end", "check > late", "body > close", "check > close"),
    )
    assert edges(agent_functions.plain_code_raises) == paths("start > use > ask > end", "start > ask", "use > end")


def test_what_cannot_be_reached_is_left_out() -> None:
    assert edges(agent_functions.returns_through) == paths("start > async with > work > leave > end")


@pytest.mark.parametrize("function", [agent_functions.margin, agent_functions.Tools.look])
def test_texts_at_the_margin_do_not_disturb(function: Any) -> None:
    assert edges(function) == paths("start > once > end")


def test_an_agent_is_drawn_as_its_function() -> None:
    flow = flow_graph(agent_functions.decorated)
    assert (flow.name, flow.edges) == ("decorated", (("start", "yield"), ("yield", "end")))


NO_SOURCE: dict[str, Any] = {}
exec("async def unknown():\n    yield 1", NO_SOURCE)


@pytest.mark.parametrize("function", [len, NO_SOURCE["unknown"], functools.partial(print), 3])
def test_a_function_without_source_is_an_error_that_says_so(function: Any) -> None:
    with pytest.raises(ValueError, match="the source of .* is not available, define it in a file"):
        flow_graph(function)


def test_what_is_no_definition_is_an_error() -> None:
    for function in (lambda: 1, agent_functions.Tools):
        with pytest.raises(ValueError, match="is no function definition"):
            flow_graph(function)


@pytest.mark.parametrize(
    "function",
    [value for value in vars(agent_functions).values() if getattr(value, "__module__", "") == "agent_functions"],
)
def test_a_drawing_is_xml_and_shows_each_state(function: Any) -> None:
    if isinstance(function, type):
        function = function.look
    flow = flow_graph(function)
    shown = "\n".join(texts(flow.svg()))
    for state in flow.states[1:-1]:
        assert f"{state.line}: {state.call.replace(chr(0), '')[:30]}" in shown


@pytest.mark.parametrize("seed", range(20))
def test_boxes_of_a_drawing_do_not_overlap(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"state {number}" * rng.randrange(1, 4) for number in range(rng.randrange(2, 30))]
    states = tuple(FlowState(name, "tool", 1, name) for name in names)
    edges = tuple({(rng.choice(names), rng.choice(names)) for _ in range(2 * len(names))})
    svg = FlowGraph(states, edges).svg()
    sizes = re.findall(r'<rect x="([-.\d]+)" y="([-.\d]+)" width="([.\d]+)" height="([.\d]+)"', svg)
    boxes = [tuple(map(float, size)) for size in sizes]
    assert len(boxes) == len(names)
    for (x, y, width, height), (left, top, wide, high) in itertools.combinations(boxes, 2):
        assert x + width < left or left + wide < x or y + height < top or top + high < y


def test_forkable_states_are_drawn_differently() -> None:
    states = (FlowState("start", "start", 1, "f()"), FlowState("gen", "gen", 2, "chat.gen()", forkable=True))
    fixed = (states[0], FlowState("gen", "gen", 2, "chat.gen()"))
    drawings = [FlowGraph(these, (("start", "gen"),)).svg() for these in (states, fixed)]
    assert [drawing.count("<rect") for drawing in drawings] == [4, 3]


def test_counts_are_shown_at_states_and_edges() -> None:
    flow = flow_graph(agent_functions.bug_repair)
    counts = {"gen": 4, "resume": 1, ("resume", "next"): 3, ("resume", "end"): 1}
    assert {"4 times", "1 time", "3", "1"} <= set(texts(flow.svg(counts)))
    assert flow.svg(counts).count("stroke-dasharray") == len(flow.edges) - 2, "edges without a count are dashed"
    assert "dasharray" not in flow.svg({"gen": 4})
    with pytest.raises(ValueError, match="counts has 'generate', which is neither an edge nor one of the states start"):
        flow.svg({"generate": 1})
