"""Graph of a run: the agents with their messages, the search trees of their states, and the flow graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from hf_parallel.agents.drawing.control_flow import START, FlowState
from hf_parallel.agents.drawing.flow_graph import FlowGraph, flow_graph
from hf_parallel.agents.drawing.svg import Box, Drawing, Link, document, draw, note, shorten
from hf_parallel.agents.trace import Event, RunTrace, function_name

MAX_STATES = 300
"""Number of states of search trees that are drawn."""
_TO_CHILD = ("spawn", "next", "resume")
_VISITS = (*_TO_CHILD, "gen", "tool", "yield", "end")
_STYLES = {"committed": "plain", "selected": "chosen", "dropped": "dropped"}


def run_graph(trace: RunTrace) -> str:
    """Return the graph of a run as SVG text.

    Instances of one function are one box, with the numbers of its calls; arrows are spawns and messages with their
    numbers. Below it are the states of each agent that has several: selected ones green, dropped ones dashed.
    """
    return graph(trace, {})


def graph(trace: RunTrace, functions: Mapping[str, Callable[..., object]]) -> str:
    """Return `run_graph` with the flow graphs of functions, or agents, below it, by their names in the run.

    States and edges show how often the run took them, where its events say their line in the source. Dashed edges are
    not known to be taken. If the source of a function is not available, a line says so.
    """
    drawings = [("Agents", _agents(trace)), *_trees(trace)]
    for name, function in functions.items():
        try:
            flow = flow_graph(function)
        except ValueError as error:
            drawings.append(("", note(shorten(str(error), 100))))
        else:
            drawings.append((f"Flow graph of {name}", flow.drawing(visits(trace, name, flow))))
    return document(drawings, "run of agents")


def instance_names(trace: RunTrace) -> dict[str, str]:
    """Return the name of the function of each agent instance, in the order in which they appear."""
    names: dict[str, str] = {}
    for event in trace.events:
        if event.agent:
            names.setdefault(event.agent, function_name(event.agent))
        if event.kind == "spawn":
            names[event.data["child"]] = event.data["name"]
    return names


def _agents(trace: RunTrace) -> Drawing:
    names = instance_names(trace)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names.values()}
    for name in names.values():
        counts[name]["instance"] += 1
    links: dict[tuple[str, str], Counter[str]] = {}
    for event in trace.events:
        name = names.get(event.agent, "")
        if name:
            counts[name][event.kind] += 1
            counts[name]["token"] += event.data["tokens"] if event.kind == "gen" else 0
        if event.kind in _TO_CHILD:
            child = names.get(event.data["child"], function_name(event.data["child"]))
            if child in counts:
                links.setdefault((name, child), Counter())[event.kind] += 1
        parent = event.agent.rpartition("/")[0]
        if event.kind == "yield" and parent in names:
            links.setdefault((name, names[parent]), Counter())["yield"] += 1
    order = list(counts)
    boxes, arrows = [Box(name, (name, *_summary(count))) for name, count in counts.items()], []
    for (begin, end), messages in links.items():
        words = ", ".join(f"{kind} {number}" for kind, number in messages.items())
        if order.index(begin) < order.index(end):  # words in the order of the boxes have a place of their own
            boxes.insert([box.name for box in boxes].index(end), Box(f"{begin} {end}", (words,), "words"))
            arrows += [Link(begin, f"{begin} {end}", tip=False), Link(f"{begin} {end}", end)]
        else:
            arrows.append(Link(begin, end, words))
    return draw(boxes, arrows)


def _summary(counts: Counter[str]) -> list[str]:
    """Return the numbers of an agent's calls in words."""
    units = {"instance": "instance", "gen": "generation", "token": "token", "tool": "tool call", "error": "error"}
    words = [count(counts[kind], unit) for kind, unit in units.items() if counts[kind]]
    return [text for text in (", ".join(words[:3]), ", ".join(words[3:])) if text]


def count(number: int, unit: str) -> str:
    """Return a number with its unit: `1 token`, `2 tokens`."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _trees(trace: RunTrace) -> list[tuple[str, Drawing]]:
    """Return the search trees of the agents that have several states, up to `MAX_STATES` states together."""
    events: dict[str, list[Event]] = {}
    for event in trace.events:
        if event.kind == "state":
            events.setdefault(event.agent, []).append(event)
    drawings, left, out = [], MAX_STATES, 0
    for agent, found in events.items():
        boxes, links = _states(found)
        if len(boxes) < 2:
            continue
        if len(boxes) > left:
            out += len(boxes)
            continue
        left -= len(boxes)
        drawings.append((f"States of {agent}", draw(boxes, links)))
    if out:
        drawings.append(("", note(f"{out} more states are not drawn.")))
    return drawings


def _states(events: Iterable[Event]) -> tuple[list[Box], list[Link]]:
    latest: dict[str, tuple[float | None, str]] = {}  # value and status
    links: dict[tuple[str, str], None] = {}
    for event in events:
        parent, value = event.data["parent"], event.data["value"]
        if parent is not None:
            latest.setdefault(parent, (None, "committed"))
            links[parent, event.state] = None
        known, _ = latest.get(event.state, (None, ""))
        latest[event.state] = (known if value is None else value, event.data["status"])
    boxes = []
    for state, (value, status) in latest.items():
        lines = (state,) if value is None else (state, f"{value:.3g}")
        boxes.append(Box(state, lines, _STYLES[status], f"state {state}: {status}"))
    return boxes, [Link(*link) for link in links]


def visits(trace: RunTrace, name: str, flow: FlowGraph) -> Counter[str | tuple[str, str]]:
    """Return how often the instances of a function were in its states, and took its edges.

    The events of a transition follow those of its parent in the search tree. Operations without a line are those of
    value functions and of `gather`. Of several states that an event may be a visit of, it is the one that can follow.
    """
    names = instance_names(trace)
    following: dict[str, list[FlowState]] = {state.name: [] for state in flow.states}
    for begin, end in flow.edges:
        following[begin].append(next(state for state in flow.states if state.name == end))
    counts: Counter[str | tuple[str, str]] = Counter()
    counts["start"] = sum(one == name for one in names.values())
    last: dict[tuple[str, str], str] = {}  # state of the source, by instance and state of the search tree
    for event in trace.events:
        if names.get(event.agent) != name or event.kind not in _VISITS:
            continue
        before = _last(last, event)
        found = [state for state in flow.states if _is_at(event, state)]
        found = found if len(found) == 1 else [state for state in found if state in following[before]]
        if len(found) == 1:
            after = last[event.agent, event.state] = found[0].name
            counts[after] += 1
            counts[before, after] += found[0] in following[before]
    return +counts


def _last(last: Mapping[tuple[str, str], str], event: Event) -> str:
    """Return the state of the source that an event follows."""
    state = event.state
    while (event.agent, state) not in last:
        if "." not in state:
            return START
        state = state.rpartition(".")[0]
    return last[event.agent, state]


def _is_at(event: Event, state: FlowState) -> bool:
    """Return whether an event may be a visit of a state."""
    if event.kind in ("yield", "end"):  # they have no line
        return state.kind == event.kind
    named = event.kind != "tool" or state.name.partition(" ")[0] == event.data["name"]
    return state.kind == event.kind and named and event.data.get("line") == state.line
