"""A run of agents as a self-contained HTML page, with a lane per agent.

`page.html` is the jinja2 template and `page.js` its zoom. All text of the trace is escaped, and the content security
policy of the page allows no script but its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_parallel.agents.drawing.mermaid import count, shorten
from hf_parallel.agents.drawing.run_graph import instance_names, run_graph
from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.transcript.page import HUES, fill

_LENGTH, _LONG = 80, 4000
"""Maximum numbers of characters: of a text in a box, and of a text shown on a click."""
_AXIS, _MARKS, _GAP = 20, 12, 7
"""Heights in pixels: the axis, the row of marks in a lane, the space between lanes."""
_MESSAGES = {
    "spawn": "{from} spawns {to}",
    "next": "{from} asks {to} for its next value",
    "resume": "{from} resumes {to}",
    "yield": "{from} yields to {to}",
}
_ENDS = {"end": "ended", "error": "failed", "cancel": "cancelled"}


@dataclass
class _Lane:
    """Boxes, marks and position of an agent, for the template."""

    agent: str
    label: str
    depth: int
    hue: int
    status: str = "unfinished"
    top: int = 0
    height: int = 0
    boxes: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)


def render(trace: RunTrace) -> str:
    """Return a trace as an HTML page.

    Lanes have boxes for generations, tools and waiting, and marks for search states. Arrows are messages between
    agents. Below is the graph of the run as Mermaid text.

    Raises
    ------
    ValueError
        If an event lacks an entry of its kind, or has one of another type.
    """
    trace = RunTrace.from_dict(trace.to_dict())
    seconds = max([1e-9, *(event.time for event in trace.events)])
    span = 1.01 * seconds  # the last marks are within the lane
    names = instance_names(trace)
    lanes = {lane.agent: lane for lane in _lanes(names)}
    for event in trace.events:
        if event.agent in lanes:
            _add(event, lanes[event.agent])
    top = _AXIS
    for lane in lanes.values():
        lane.top, lane.height = top, _stack(lane.boxes, span) + (_MARKS if lane.marks else 0)
        top += lane.height + _GAP
    step = 10.0 ** math.floor(math.log10(span)) / 5
    return fill(
        Path(__file__).with_name("page.html"),
        title=f"Run of {next(iter(lanes), 'no agent')}",
        facts=_facts(trace, names, seconds),
        lanes=list(lanes.values()),
        height=top,
        span=span,
        kinds=list(_MESSAGES),
        arrows=list(_arrows(trace, lanes)),
        ticks=[(number * step, _time(number * step)) for number in range(int(span / step) + 1)],
        graph=run_graph(trace),
    )


def _lanes(names: Mapping[str, str]) -> Iterator[_Lane]:
    """Yield the lanes of agents in order of appearance, each followed by its children's."""
    place = {agent: number for number, agent in enumerate(names)}
    hues = {name: HUES[number % len(HUES)] for number, name in enumerate(dict.fromkeys(names.values()))}
    paths = {}
    for agent in names:
        parts = agent.split("/")
        above = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        paths[agent] = [place[one] for one in above if one in place]
    for agent in sorted(names, key=paths.__getitem__):
        depth = len(paths[agent]) - 1
        label = agent.rpartition("/")[2] if depth else agent
        yield _Lane(agent, label, depth, hues[names[agent]])


def _add(event: Event, lane: _Lane) -> None:
    """Add an event to the lane of its agent."""
    data = event.data
    where = f"{event.agent}, state {event.state}" if event.state else event.agent
    if event.kind in ("gen", "tool", "next"):
        label, about = _words(event)
        failed = " failed" if data.get("error") is not None else ""
        box = {"begin": data["begin"], "end": event.time, "kind": event.kind + failed, "label": shorten(label, _LENGTH)}
        about = f"{where}, {_time(data['begin'])}\u2013{_time(event.time)}: {about}"
        lane.boxes.append(box | {"about": shorten_end(about)})
    elif event.kind in ("state", "yield", *_ENDS):
        kind = event.kind
        if kind == "state":
            parent = "" if data["parent"] is None else f" from {data['parent']}"
            value = "" if data["value"] is None else f", value {data['value']:.4g}"
            kind, about = data["status"], f"{data['status']}{parent}{value}"
        else:
            lane.status = _ENDS.get(kind, lane.status)
            about = f"{_ENDS.get(kind, 'yields')} {data.get('error', data.get('value', ''))}".rstrip()
        about = shorten_end(f"{where}, {_time(event.time)}: {about}")
        lane.marks.append({"time": event.time, "kind": kind, "about": about})


def _words(event: Event) -> tuple[str, str]:
    """Return the label and the tooltip of a box."""
    data = event.data
    if event.kind == "next":
        return f"waits for {data['child'].rpartition('/')[2]}", f"waits for {data['child']}"
    if event.kind == "tool":
        error = data["error"]
        return data["name"], f"tool {data['name']}\n\n{data['result'] if error is None else f'error: {error}'}"
    prompt = count(data["prompt_tokens"], "prompt token")
    settings = "".join(f"\n{name} = {value}" for name, value in data["settings"].items())
    about = f"{count(data['tokens'], 'token')}, {data['reused']} of {prompt} reused{settings}\n\n{data['text']}"
    return data["text"], about


def shorten_end(text: str) -> str:
    """Return the beginning of a long text."""
    return text if len(text) <= _LONG else f"{text[:_LONG]}\u2026 and {count(len(text) - _LONG, 'character')} more"


def _stack(boxes: list[dict[str, Any]], span: float) -> int:
    """Place the boxes of a lane in rows without overlaps, and return the height of the rows in pixels."""
    boxes.sort(key=lambda box: (box["begin"], box["end"]))
    ends: list[float] = []  # of the last box of each row
    for box in boxes:
        box["row"] = next((row for row, end in enumerate(ends) if end <= box["begin"]), len(ends))
        ends[box["row"] :] = [max(box["end"], box["begin"] + span / 500), *ends[box["row"] + 1 :]]
    height = 20 if len(ends) <= 6 else 10 if len(ends) <= 20 else 5
    for box in boxes:
        box["top"], box["height"] = box["row"] * height, height - 1
    return max(len(ends) * height, 20)


def _arrows(trace: RunTrace, lanes: Mapping[str, _Lane]) -> Iterator[dict[str, Any]]:
    """Yield the messages between lanes as vertical arrows."""
    for event in trace.events:
        if event.kind not in _MESSAGES:
            continue
        target = event.agent.rpartition("/")[0] if event.kind == "yield" else event.data["child"]
        begin, end = lanes.get(event.agent), lanes.get(target)
        if begin is None or end is None:
            continue
        middle, is_down = begin.top + begin.height / 2, end.top > begin.top
        edge = end.top if is_down else end.top + end.height
        words = _MESSAGES[event.kind].format(**{"from": event.agent, "to": target})
        time = event.data.get("begin", event.time)
        value = f": {event.data['value']}" if event.kind == "yield" else ""
        yield {
            **{"time": time, "top": min(middle, edge), "height": abs(edge - middle), "kind": event.kind},
            **{"way": "down" if is_down else "up", "about": shorten_end(f"{words}, {_time(time)}{value}")},
        }


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.5g} ms" if seconds < 1 else f"{seconds:.5g} s"


def _facts(trace: RunTrace, names: Mapping[str, str], seconds: float) -> str:
    """Return the numbers of a run in words."""
    kinds = Counter(event.kind for event in trace.events)
    gens = [event.data for event in trace.events if event.kind == "gen"]
    words = [count(len(names), "agent"), count(len(gens), "generation")]
    words.append(count(sum(data["tokens"] for data in gens), "token"))
    if prompt := sum(data["prompt_tokens"] for data in gens):
        words.append(f"{sum(data['reused'] for data in gens) / prompt:.0%} of {prompt} prompt tokens reused")
    units = {"tool": "tool call", "spawn": "spawn", "error": "error"}
    words += [count(kinds[kind], unit) for kind, unit in units.items() if kinds[kind]]
    if kinds["kv"]:
        most = max(event.data["bytes"] for event in trace.events if event.kind == "kv")
        words.append(f"KV cache up to {most / 1e6:.3g} MB")
    return f"{', '.join(words)}; {_time(seconds)}"
