"""Drawing: a run of agents as an HTML page, that of a transcript with the run's agents, scores and searches above it.

`run.html` is its jinja2 template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from hf_parallel.agents.search_tree import SearchTree, search_trees
from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.transcript import page
from hf_parallel.transcript.record import COMPUTED
from hf_parallel.transcript.sections import FORMAT, VERSION, Card, Section, TranscriptStyle
from hf_parallel.transcript.tree import tree_cells

TEMPLATE = Path(__file__).with_name("run.html")
PLOT_WIDTH = 640
PLOT_HEIGHT = 160
"""Size of the plot of scores, in pixels, without its labels."""


def render(trace: RunTrace) -> str:
    """Return a run as an HTML page: a column for each agent, and a card for each of its operations.

    Simultaneous operations of an agent get columns of their own. Above are a table of what each role has used, its
    scores over time if the engine has a policy with scores, and the states of searches. Raises `ValueError` if the
    trace is damaged.
    """
    try:
        trees = [_tree(tree) for tree in search_trees(trace.events)]
        return page.render(_transcript(trace), TEMPLATE, usage=_usage(trace), plot=_plot(trace), trees=trees)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"the trace is damaged: {type(error).__name__} {error}") from error


def _transcript(trace: RunTrace) -> Mapping[str, Any]:
    """Return a run as the plain data of a transcript, whose passes are the order of events."""
    agents = list(dict.fromkeys(event.agent for event in trace.events if event.agent))
    spans = [(float(event.data.get("begin", event.time)), event) for event in trace.events]
    spans.sort(key=lambda span: span[0])
    times = set()
    for begin, event in spans:
        times |= {begin, event.time}
    ticks = {time: tick for tick, time in enumerate(sorted(times))}
    columns: dict[str, int] = {}
    ends: dict[str, int] = {}  # last tick of each column
    cards = []
    for begin, event in spans:
        words = _words(event)
        if not event.agent or words is None:
            continue
        first = ticks[begin]
        last = ticks[event.time]
        lanes = (event.agent if lane == 1 else f"{event.agent}, {lane}" for lane in count(1))
        lane = next(lane for lane in lanes if ends.get(lane, -1) < first)
        ends[lane] = last
        column = columns.setdefault(lane, len(columns))
        heading, text = words
        cards.append(Card(column, first, last, "end", heading, [(last, text, COMPUTED)]))
    generations = [event.data for event in trace.events if event.kind == "gen"]
    facts = {
        "agents": len(agents),
        "generations": len(generations),
        "tokens": sum(data["tokens"] for data in generations),
    }
    for name, key in _PROMPTS.items():
        facts[name] = sum(data[key] for data in generations)
    facts["seconds"] = round(max((event.time for event in trace.events), default=0.0), 3)
    return {
        "format": FORMAT,
        "version": VERSION,
        "mode": f"run of {next(iter(agents), 'no agent')}",
        "settings": {},
        "passes": len(ticks),
        "style": TranscriptStyle("operation", visibility="")._asdict(),
        "stats": None,
        "facts": [(number, unit) for unit, number in facts.items()],
        "sections": [asdict(Section(None, 0, [*columns], cards))],
    }


_PROMPTS = {"prompt tokens": "prompt_tokens", "of them reused": "reused"}


def _words(event: Event) -> tuple[str, str] | None:
    """Return heading and text of an event's card; None if it has no card."""
    data = event.data
    match event.kind:
        case "gen":
            return "", data["text"]
        case "tool":
            result = data["result"] if data["error"] is None else f"failed: {data['error']}"
            return f"tool {data['name']}: ", result
        case "next":
            return f"waits for {data['child']}", ""
        case "spawn" | "resume":
            return f"{event.kind}s {data['child']}", ""
        case "yield" | "end":
            return f"{event.kind}s: ", data["value"]
        case "error":
            return "failed: ", data["error"]
        case "cancel":
            return "canceled", ""
    return None


def _usage(trace: RunTrace) -> list[dict[str, object]]:
    """Return the rows of the table of roles, with the parts of all requests and tokens in percent."""
    usage = trace.usage()
    all_requests = sum(role.requests for role in usage.values())
    all_tokens = sum(role.prompt_tokens + role.tokens for role in usage.values())
    return [
        {
            "role": name,
            **asdict(role),
            "request_part": round(100 * role.requests / max(all_requests, 1)),
            "token_part": round(100 * (role.prompt_tokens + role.tokens) / max(all_tokens, 1)),
            "seconds": f"{role.seconds:.2f}",
        }
        for name, role in usage.items()
    ]


def _plot(trace: RunTrace) -> dict[str, object] | None:
    """Return the curve of each role's contribution score, in pixels; None without scores."""
    rounds = [(event.time, event.data["scores"]) for event in trace.events if event.kind == "scores"]
    if not rounds:
        return None
    roles = list(dict.fromkeys(role for _, scores in rounds for role in scores))
    begin, _ = rounds[0]
    end, last_scores = rounds[-1]
    duration = max(end - begin, 1e-9)
    curves = []
    for number, role in enumerate(roles):
        points = []
        for time, scores in rounds:
            if role in scores:
                x = PLOT_WIDTH * (time - begin) / duration
                y = PLOT_HEIGHT * (1 - scores[role])
                points.append((x, y))
        curve = {
            "role": role,
            "hue": page.HUES[number % len(page.HUES)],
            "last": last_scores.get(role),
            "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            "end": [round(value, 1) for value in points[-1]],
        }
        curves.append(curve)
    return {
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "begin": f"{begin:.2f}",
        "end": f"{end:.2f}",
        "rounds": len(rounds),
        "curves": curves,
    }


def _tree(tree: SearchTree) -> dict[str, object]:
    """Return the drawing of a tree with its heading."""
    cells = tree_cells(tree.root)
    words = f"{cells['counted']} states, {cells['pruned']} pruned"
    return {"heading": f"Search of {tree.agent_id}: {words}", **cells}
