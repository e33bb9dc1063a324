"""Graph of a run: agents with their messages, search trees and flow graphs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from hf_parallel.agents.drawing.flow_graph import flow_graph
from hf_parallel.agents.drawing.mermaid import Flowchart, count
from hf_parallel.agents.trace import RunTrace, function_name

MAX_STATES = 300
"""Maximum number of search states to draw."""
_TO_CHILD = ("spawn", "next", "resume")


def run_graph(trace: RunTrace, functions: Mapping[str, Callable[..., object]] | None = None) -> str:
    """Return the graph of a run as Mermaid text.

    Instances of one function are one node, with their numbers of calls and messages. Below are the states of each
    search, with selected ones green and dropped ones dashed, and the flow graphs of `functions` by their names in the
    run. A suspension point shows its number of visits, where events record their source line.
    """
    chart = Flowchart()
    with chart.group("Agents"):
        _agents(chart, trace)
    _searches(chart, trace)
    visits: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
    names = instance_names(trace)
    for event in trace.events:
        visits[names.get(event.agent, "")][event.kind, event.data.get("line") or 0] += 1
    for name, function in (functions or {}).items():
        with chart.group(f"Flow graph of {name}"):
            try:
                flow_graph(function).draw(chart, visits[name])
            except ValueError as error:
                chart.node(("no source", name), str(error))
    return str(chart)


def instance_names(trace: RunTrace) -> dict[str, str]:
    """Return the function name of each agent instance, in order of appearance."""
    names: dict[str, str] = {}
    for event in trace.events:
        if event.agent:
            names.setdefault(event.agent, function_name(event.agent))
        if event.kind == "spawn":
            names[event.data["child"]] = event.data["name"]
    return names


def _agents(chart: Flowchart, trace: RunTrace) -> None:
    names = instance_names(trace)
    counts = {name: Counter[str]() for name in names.values()}
    links: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name in names.values():
        counts[name]["instance"] += 1
    for event in trace.events:
        if (name := names.get(event.agent, "")) not in counts:
            continue
        counts[name][event.kind] += 1
        counts[name]["token"] += event.data["tokens"] if event.kind == "gen" else 0
        other = event.data["child"] if event.kind in _TO_CHILD else event.agent.rpartition("/")[0]
        if event.kind in (*_TO_CHILD, "yield") and other in names:
            links[name, names[other]][event.kind] += 1
    units = {"instance": "instance", "gen": "generation", "token": "token", "tool": "tool call", "error": "error"}
    for name, found in counts.items():
        chart.node(name, name, ", ".join(count(found[kind], unit) for kind, unit in units.items() if found[kind]))
    for (begin, end), messages in links.items():
        chart.link(begin, end, ", ".join(f"{kind} {number}" for kind, number in messages.items()))


def _searches(chart: Flowchart, trace: RunTrace) -> None:
    """Draw the search trees with several states, up to `MAX_STATES` states in all."""
    trees: dict[str, dict[str, tuple[str | None, float | None, str]]] = defaultdict(dict)  # parent, value, status
    for event in trace.events:
        if event.kind == "state":
            parent, value = event.data["parent"], event.data["value"]
            if parent is not None:
                trees[event.agent].setdefault(parent, (None, None, "committed"))
            known = trees[event.agent].get(event.state, (None, None, ""))
            trees[event.agent][event.state] = (parent, known[1] if value is None else value, event.data["status"])
    left, omitted = MAX_STATES, 0
    for agent, states in trees.items():
        if len(states) > left:
            omitted += len(states)
        elif len(states) > 1:
            left -= len(states)
            with chart.group(f"States of {agent}"):
                for state, (_, value, status) in states.items():
                    lines = (state,) if value is None else (state, f"{value:.3g}")
                    chart.node((agent, state), *lines, style="" if status == "committed" else status)
                for state, (parent, _, _) in states.items():
                    if parent is not None:
                        chart.link((agent, parent), (agent, state))
    if omitted:
        chart.node("omitted", f"{count(omitted, 'more state')} not drawn")
