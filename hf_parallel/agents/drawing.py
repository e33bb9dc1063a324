"""Drawing: a run of agents as the HTML page of a transcript."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.transcript import page
from hf_parallel.transcript.record import COMPUTED
from hf_parallel.transcript.sections import FORMAT, VERSION, Card, Section, TranscriptStyle


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
