"""Drawing: a run of agents as Mermaid text, and as the HTML page of a transcript."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.transcript import page
from hf_parallel.transcript.record import COMPUTED
from hf_parallel.transcript.sections import FORMAT, VERSION, Card, Section, TranscriptStyle

MAX_STATES = 300
"""Maximum number of search states to draw."""
STYLES = {"selected": "fill:#e2f3e6,stroke:#2c7a3f", "dropped": "stroke-dasharray:4 3"}
_SPECIAL = re.compile(r'["#&;<>`\\]')
_TO_CHILD = ("spawn", "next", "resume")


def run_graph(trace: RunTrace) -> str:
    """Return a run as Mermaid text: the agents with their messages, and the states of each search.

    Instances of one function are one node. Selected states are green, dropped ones dashed.
    """
    lines = ["flowchart TD", *(f"classDef {name} {style}" for name, style in STYLES.items())]
    ids: dict[str, str] = {}  # of the nodes, by name of the function
    links: Counter[tuple[str, str, str]] = Counter()
    for event in trace.events:
        if event.agent:
            name = _function(event.agent)
            ids.setdefault(name, f"a{len(ids)}")
            other = event.data["child"] if event.kind in _TO_CHILD else event.agent.rpartition("/")[0]
            if event.kind in (*_TO_CHILD, "yield") and other:
                ids.setdefault(_function(other), f"a{len(ids)}")
                links[name, _function(other), event.kind] += 1
    lines += [f"{node}[{_label(name)}]" for name, node in ids.items()]
    lines += [f"{ids[begin]} -->|{kind} {number}| {ids[end]}" for (begin, end, kind), number in links.items()]
    return "\n".join([*lines, *_searches(trace)]) + "\n"


def _function(agent: str) -> str:
    """Return the function name of an agent instance: `gather` for `solve#0/gather#1`."""
    return agent.rpartition("/")[2].partition("#")[0]


def _searches(trace: RunTrace) -> Iterator[str]:
    """Yield the lines of the search trees with several states, up to `MAX_STATES` states in all."""
    trees: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in trace.events:
        if event.kind == "state":
            known = trees[event.agent].get(event.state, {})
            trees[event.agent][event.state] = known | {k: v for k, v in event.data.items() if v is not None}
            if (parent := event.data["parent"]) is not None:
                trees[event.agent].setdefault(parent, {})
    left = MAX_STATES
    for number, (agent, states) in enumerate(trees.items()):
        if not 1 < len(states) <= left:
            continue
        left -= len(states)
        ids = {state: f"s{number}x{index}" for index, state in enumerate(states)}
        yield f"subgraph g{number}[{_label(f'States of {agent}')}]"
        for state, data in states.items():
            words = (state,) if "value" not in data else (state, f"{data['value']:.3g}")
            style = f":::{data['status']}" if data.get("status") in STYLES else ""
            yield f"{ids[state]}[{_label(*words)}]{style}"
        yield from (f"{ids[data['parent']]} --> {ids[state]}" for state, data in states.items() if "parent" in data)
        yield "end"


def render(trace: RunTrace) -> str:
    """Return a run as an HTML page: a column for each agent, and a card for each of its operations.

    Simultaneous operations of an agent get columns of their own. Raises `ValueError` if the trace is damaged.
    """
    try:
        return page.render(_transcript(trace))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"the trace is damaged: {type(error).__name__} {error}") from error


def _transcript(trace: RunTrace) -> Mapping[str, Any]:
    """Return a run as the plain data of a transcript, whose passes are the order of events."""
    agents = list(dict.fromkeys(event.agent for event in trace.events if event.agent))
    spans = [(float(event.data.get("begin", event.time)), event) for event in trace.events]
    ticks = {
        time: tick for tick, time in enumerate(sorted({time for begin, one in spans for time in (begin, one.time)}))
    }
    columns: dict[str, int] = {}
    ends: dict[str, int] = {}  # last tick of each column
    cards = []
    for begin, event in sorted(spans, key=lambda span: span[0]):
        if not event.agent or (words := _words(event)) is None:
            continue
        first, last = ticks[begin], ticks[event.time]
        lanes = (event.agent if lane == 1 else f"{event.agent}, {lane}" for lane in count(1))
        column = next(column for column in lanes if ends.get(column, -1) < first)
        ends[column] = last
        place = columns.setdefault(column, len(columns))
        cards.append(Card(place, first, last, "end", words[0], [(last, words[1], COMPUTED)]))
    gens = [event.data for event in trace.events if event.kind == "gen"]
    facts = {"agents": len(agents), "generations": len(gens), "tokens": sum(data["tokens"] for data in gens)}
    facts |= {name: sum(data[key] for data in gens) for name, key in _PROMPTS.items()}
    facts["seconds"] = round(max((event.time for event in trace.events), default=0.0), 3)
    return {
        **{"format": FORMAT, "version": VERSION, "mode": f"run of {next(iter(agents), 'no agent')}", "settings": {}},
        **{"passes": len(ticks), "style": TranscriptStyle("operation", visibility="")._asdict(), "stats": None},
        "facts": [(number, unit) for unit, number in facts.items()],
        "sections": [asdict(Section(None, 0, [*columns], cards, [("Graph (Mermaid)", run_graph(trace))]))],
    }


_PROMPTS = {"prompt tokens": "prompt_tokens", "of them reused": "reused"}


def _words(event: Event) -> tuple[str, str] | None:
    """Return heading and text of an event's card; None if it has no card."""
    data = event.data
    match event.kind:
        case "gen":
            return "", data["text"]
        case "tool":
            return f"tool {data['name']}: ", data["result"] if data["error"] is None else f"failed: {data['error']}"
        case "next":
            return f"waits for {data['child']}", ""
        case "spawn" | "resume":
            return f"{event.kind}s {data['child']}", ""
        case "yield" | "end":
            return f"{event.kind}s: ", data["value"]
        case "error":
            return "failed: ", data["error"]
        case "cancel":
            return "cancelled", ""
    return None


def _label(*lines: str) -> str:
    """Return lines as a quoted label; special characters of Mermaid and HTML become entities."""
    plain = ("".join(one for one in line if one.isprintable()) for line in lines)
    return f'"{"<br>".join(_SPECIAL.sub(lambda found: f"#{ord(found[0])};", line) for line in plain)}"'
