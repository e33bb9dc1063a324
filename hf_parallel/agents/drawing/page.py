"""A run of agents as one self-contained HTML page: a lane for each agent, with time across.

`page.html` is the jinja2 template and `page.js` its zoom. All text of the trace is escaped, and the content security
policy of the page allows no script but its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from markupsafe import Markup

from hf_parallel.agents.drawing.run_graph import count, instance_names, run_graph
from hf_parallel.agents.drawing.svg import shorten
from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.transcript.page import HUES, fill

_LENGTH, _LONG = 80, 4000
"""Characters of a text in a box, and of a text that is shown on a click."""
_AXIS, _MARKS, _GAP = 20, 12, 7
"""Heights in pixels: the axis, the row of marks in a lane, the space between lanes."""
_HEIGHTS = ((6, 20), (20, 10), (math.inf, 5))
"""Heights of boxes in pixels in lanes of up to so many rows of boxes."""
_MESSAGES = {
    "spawn": "{from} spawns {to}",
    "next": "{from} asks {to} for its next value",
    "resume": "{from} resumes {to}",
    "yield": "{from} yields to {to}",
}
_Box: TypeAlias = dict[str, Any]
_ENDS = {"end": "ended", "error": "failed", "cancel": "cancelled"}


@dataclass
class _Lane:
    """An agent: its boxes and marks as the template needs them, and its place."""

    agent: str
    name: str
    depth: int
    hue: int
    status: str = "unfinished"
    top: int = 0
    height: int = 0
    boxes: list[_Box] = field(default_factory=list)
    marks: list[dict[str, str]] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    @property
    def label(self) -> str:
        return self.agent.rpartition("/")[2] if self.depth else self.agent


def render(trace: RunTrace) -> str:
    """Return a trace as an HTML page.

    Lanes have boxes for generations, tools and waiting, marks for states of the search, and arrows for messages between
    agents. Below them are the KV cache and the contribution scores, if the trace has events with them, and the graph.

    Raises
    ------
    ValueError
        If an event lacks an entry that its kind must have, or has one of another type.
    """
    trace = RunTrace.from_dict(trace.to_dict())
    seconds = max([1e-9, *(event.time for event in trace.events)])
    span = 1.01 * seconds  # the last marks are within the lane
    names = instance_names(trace)
    hues = {name: HUES[number % len(HUES)] for number, name in enumerate(dict.fromkeys(names.values()))}
    lanes = {agent: _Lane(agent, names[agent], depth, hues[names[agent]]) for agent, depth in _family(names)}
    for event in trace.events:
        if event.agent in lanes:
            _add(event, lanes[event.agent], span)
    top = _AXIS
    for lane in lanes.values():
        lane.top, lane.height = top, _stack(lane.boxes, span) + (_MARKS if lane.marks else 0)
        top += lane.height + _GAP
    return fill(
        Path(__file__).with_name("page.html"),
        title=f"Run of {next(iter(lanes), 'no agent')}",
        facts=_facts(trace, names, seconds),
        lanes=list(lanes.values()),
        height=top,
        kinds=list(_MESSAGES),
        arrows=list(_arrows(trace, lanes, span)),
        ticks=[(_percent(at, span), _tick(at, span)) for at in _ticks(span)],
        charts=[chart for chart in (_kv(trace, span), _scores(trace, hues, span)) if chart["lines"]],
        graph=Markup(run_graph(trace)),
    )


def _family(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield agents with their depth, each followed by its children in the order in which they appeared."""
    children: dict[str, list[str]] = {}
    names = list(names)
    known = set(names)
    for agent in names:
        parent = agent.rpartition("/")[0]
        children.setdefault(parent if parent in known else "", []).append(agent)
    waiting = [(agent, 0) for agent in reversed(children.get("", ()))]
    while waiting:
        agent, depth = waiting.pop()
        yield agent, depth
        waiting += [(child, depth + 1) for child in reversed(children.get(agent, ()))]


def _add(event: Event, lane: _Lane, span: float) -> None:
    """Add what an event shows in the lane of its agent."""
    data, end = event.data, event.time
    if event.kind in ("gen", "tool", "next"):
        label, about = _words(event)
        begin = data["begin"]
        failed = event.kind == "tool" and data["error"] is not None
        kind = f"{event.kind} failed" if failed else event.kind
        box = {"begin": begin, "end": end, "kind": kind, "label": shorten(label, _LENGTH)}
        lane.boxes.append(box | {"about": _cut(f"{_where(event)}, {_time(begin)}\u2013{_time(end)}: {about}")})
    elif event.kind == "state":
        value = "" if data["value"] is None else f", value {data['value']:.4g}"
        parent = "" if data["parent"] is None else f" from {data['parent']}"
        lane.marks.append(_mark(event, data["status"], f"{data['status']}{parent}{value}", span))
    elif event.kind in ("yield", *_ENDS):
        lane.status = _ENDS.get(event.kind, lane.status)
        text = data.get("error", data.get("value", ""))
        lane.marks.append(_mark(event, event.kind, f"{_ENDS.get(event.kind, 'yields')} {text}".rstrip(), span))


def _words(event: Event) -> tuple[str, str]:
    """Return the label of a box, and what its tooltip says about it."""
    data = event.data
    if event.kind == "next":
        return f"waits for {data['child'].rpartition('/')[2]}", f"waits for {data['child']}"
    if event.kind == "tool":
        error = data["error"]
        return data["name"], f"tool {data['name']}\n\n{data['result'] if error is None else f'error: {error}'}"
    tokens = (
        f"{count(data['tokens'], 'token')}, {data['reused']} of {count(data['prompt_tokens'], 'prompt token')} reused"
    )
    settings = "".join(f"\n{name} = {value}" for name, value in data["settings"].items())
    return data["text"], f"{tokens}{settings}\n\n{data['text']}"


def _mark(event: Event, kind: str, about: str, span: float) -> dict[str, str]:
    return {
        "x": _percent(event.time, span),
        "kind": kind,
        "about": _cut(f"{_where(event)}, {_time(event.time)}: {about}"),
    }


def _where(event: Event) -> str:
    return f"{event.agent}, state {event.state}" if event.state else event.agent


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}\u2026 and {count(len(text) - _LONG, 'character')} more"


def _stack(boxes: list[_Box], span: float) -> int:
    """Place the boxes of a lane in rows, so that none overlap, and return the height of the rows in pixels."""
    boxes.sort(key=lambda box: (box["begin"], box["end"]))
    ends: list[float] = []  # of the last box of each row
    for box in boxes:
        box["row"] = next((row for row, end in enumerate(ends) if end <= box["begin"]), len(ends))
        ends[box["row"] :] = [max(box["end"], box["begin"] + span / 500), *ends[box["row"] + 1 :]]
    height = next(height for rows, height in _HEIGHTS if len(ends) <= rows)
    for box in boxes:
        box["y"], box["height"] = box["row"] * height, height - 1
        box["x"], box["width"] = _percent(box["begin"], span), _percent(box["end"] - box["begin"], span)
    return max(len(ends) * height, _HEIGHTS[0][1])


def _arrows(trace: RunTrace, lanes: Mapping[str, _Lane], span: float) -> Iterator[dict[str, object]]:
    """Yield the messages between lanes as vertical arrows; one to a lower lane points down."""
    for event in trace.events:
        if event.kind not in _MESSAGES:
            continue
        target = event.agent.rpartition("/")[0] if event.kind == "yield" else event.data["child"]
        begin, end = lanes.get(event.agent), lanes.get(target)
        if begin is None or end is None:
            continue
        time = event.data.get("begin", event.time)
        is_down = end.top > begin.top
        edge = end.top if is_down else end.top + end.height
        words = _MESSAGES[event.kind].format(**{"from": event.agent, "to": target})
        value = f": {event.data['value']}" if event.kind == "yield" else ""
        yield {
            "x": _percent(time, span),
            "y": min(begin.middle, edge),
            "height": abs(edge - begin.middle),
            "kind": event.kind,
            "way": "down" if is_down else "up",
            "about": _cut(f"{words}, {_time(time)}{value}"),
        }


def _percent(time: float, span: float) -> str:
    return f"{100 * time / span:.4f}".rstrip("0").rstrip(".")


def _ticks(span: float) -> list[float]:
    """Return about ten round times."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 10 >= span * 0.999)
    return [number * step for number in range(int(span / step) + 1)]


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"


def _tick(at: float, span: float) -> str:
    return f"{1e3 * at:.10g} ms" if span < 1 else f"{at:.10g} s"


def _facts(trace: RunTrace, names: Mapping[str, str], seconds: float) -> str:
    """Return the numbers of a run in words."""
    kinds = Counter(event.kind for event in trace.events)
    gens = [event.data for event in trace.events if event.kind == "gen"]
    words = [count(len(names), "agent"), count(len(gens), "generation")]
    words.append(count(sum(data["tokens"] for data in gens), "token"))
    if prompt := sum(data["prompt_tokens"] for data in gens):
        words.append(f"{100 * sum(data['reused'] for data in gens) / prompt:.0f}% of {prompt} prompt tokens reused")
    units = {"tool": "tool call", "spawn": "spawn", "error": "error"}
    words += [count(kinds[kind], unit) for kind, unit in units.items() if kinds[kind]]
    return f"{', '.join(words)}; {_time(seconds)}"


def _kv(trace: RunTrace, span: float) -> dict[str, object]:
    points: dict[str, list[tuple[float, float]]] = {}
    for event in trace.events:
        if event.kind == "kv":
            points.setdefault(event.agent, []).append((event.time, float(event.data["bytes"])))
    hues = {agent: HUES[number % len(HUES)] for number, agent in enumerate(points)}
    return _chart("KV cache", points, hues, span, lambda value: f"{value / 1e6:.3g} MB")


def _scores(trace: RunTrace, hues: Mapping[str, int], span: float) -> dict[str, object]:
    points: dict[str, list[tuple[float, float]]] = {}
    for event in trace.events:
        if event.kind == "scores":
            for name, value in event.data["scores"].items():
                if math.isfinite(value):
                    points.setdefault(name, []).append((event.time, float(value)))
    other = {name: HUES[(len(hues) + number) % len(HUES)] for number, name in enumerate(points)}
    return _chart("Contribution score", points, other | dict(hues), span, "{:.3g}".format)


def _chart(
    heading: str,
    points: Mapping[str, Sequence[tuple[float, float]]],
    hues: Mapping[str, int],
    span: float,
    words: Callable[[float], str],
) -> dict[str, object]:
    """Return lines in steps, in a box of 1000 x 100, and their names with their last values."""
    values = [value for line in points.values() for _, value in line]
    low, high = min([0.0, *values]), max([0.0, *values])
    scale = 100 / (high - low) if high > low else 0.0
    lines = []
    for name, line in points.items():
        steps = [(f"{1000 * time / span:.2f}", f"{100 - (value - low) * scale:.2f}") for time, value in line]
        path = "".join(f"H{x}V{y}" for x, y in steps[1:])
        label = f"{name or 'all agents'} {words(line[-1][1])}"
        lines.append({"hue": hues[name], "label": label, "path": f"M{steps[0][0]} {steps[0][1]}{path}H1000"})
    return {"heading": heading, "most": f"up to {words(high)}", "lines": lines}
