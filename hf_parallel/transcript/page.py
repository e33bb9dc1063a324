"""A transcript as one self-contained HTML page: columns against decode passes, with a card for each step.

`page.html` is the jinja2 template and `page.js` the slider. Text is escaped, and the content security policy of the
page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from hf_parallel.transcript.record import COMPUTED, DRAFTED, HOTSPOT, REPLAYED
from hf_parallel.transcript.sections import TranscriptStyle, check_run

HUES = (215, 335, 35, 160, 270, 5, 95, 190)
"""Hues of the columns, in degrees."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_DIRECTIONS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls of the text direction. Cards isolate them; names lose them, as they are parts of sentences."""
_ORIGINS = {
    REPLAYED: "replayed from cached logits, without a forward pass",
    HOTSPOT: "sampled again at a hotspot",
    DRAFTED: "draft token, verified in the forward pass of an earlier token",
}
_VISIBILITY = {
    "live": "columns see each other's text as it is written",
    "ended": "columns see each other's finished steps",
    "never": "columns do not see each other",
}


def _printable(value: Any) -> Any:
    return value if isinstance(value, Markup) else _UNPRINTABLE.sub("\ufffd", str(value))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(run: Mapping[str, Any]) -> str:
    """Return a transcript, the dict of `ParallelOutput.to_dict` with or without `model` (a name), as an HTML page."""
    run = check_run(run)
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    style = {name: _DIRECTIONS.sub("", run["style"][name]) for name in TranscriptStyle._fields}
    origins = {piece[2] for section in run["sections"] for card in section["cards"] for piece in card["pieces"]}
    return _TEMPLATES.get_template("page.html").render(
        title=" \u00b7 ".join(filter(None, [run["mode"] or "hf_parallel", str(run.get("model", ""))])),
        style=style,
        facts=_facts(run["passes"], run["stats"] or {}),
        visibility=_VISIBILITY.get(style["visibility"], ""),
        settings="\n".join(f"{name} = {value!r}" for name, value in run["settings"].items()),
        origins={origin: words for origin, words in _ORIGINS.items() if origin in origins},
        sections=[_section(section, style) for section in run["sections"]],
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
    )


def _facts(passes: int, stats: Mapping[str, Any]) -> list[tuple[Any, str]]:
    counts = {
        name: stats[f"{name}_tokens"] for name in ("decoded", "prefilled", "replayed") if f"{name}_tokens" in stats
    }
    facts: list[tuple[Any, str]] = [(passes, "decode passes")]
    facts += [(count, f"tokens {name}") for name, count in counts.items() if count or name != "replayed"]
    return [*facts, (f"{stats['kv_bytes'] / 1e6:.1f} MB", "KV cache")] if "kv_bytes" in stats else facts


def _section(section: Mapping[str, Any], style: Mapping[str, str]) -> dict[str, Any]:
    """Return a section as the template needs it, with grid rows and the positions of the cards."""
    section = {**section, "columns": [_DIRECTIONS.sub("", name) for name in section["columns"]]}
    cards = section["cards"]
    intervals = _intervals(cards)
    heights = [min(max(16, 3 * (end - begin)), 240) for begin, end in intervals]  # pixels
    moved = {_end(card) for card in cards if style["history"] and card["ended"] == style["final_event"]}
    return {
        **section,
        "intervals": intervals,
        "rows": " ".join(f"minmax({height}px,auto)" for height in heights),
        "moves": [line for line, (begin, _) in enumerate(intervals, start=1) if begin in moved],
        "cards": list(_cards(section, style, intervals)),
        "spans": any(card["column"] is None for card in cards),
    }


def _intervals(cards: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the rows of the grid: intervals of passes in which no card begins, ends or is removed.

    Cards without a pass, such as given text, have a row of their own. The last row follows the last pass.
    """
    spans = [(card["begin"], _end(card)) for card in cards]
    gone = [card["gone"] for card in cards if card["gone"] is not None]
    bounds = sorted({0, *gone, *(at for span in spans for at in span)})
    empty = {begin for begin, end in spans if begin == end}
    return sorted([*zip(bounds, bounds[1:], strict=False), *((at, at) for at in empty), (bounds[-1], bounds[-1] + 1)])


def _end(card: Mapping[str, Any]) -> int:
    """Return the pass at which a card ends; a card without tokens ends where it begins."""
    return card["begin"] if card["end"] is None else card["end"]


def _cards(
    section: Mapping[str, Any], style: Mapping[str, str], intervals: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the cards in the order in which they began, each with the grid rows that it spans."""
    names = section["columns"]
    counts = [0] * len(names)
    for card in sorted(section["cards"], key=lambda card: (card["begin"], card["column"] is not None, card["column"])):
        column, begin, end = card["column"], card["begin"], _end(card)
        top = 1 + bisect_left(intervals, (begin, min(begin + 1, end)))
        bottom = max(top + 1, 1 + bisect_left(intervals, (end, end)))
        row_name = name = style["spanning"]
        if column is not None:
            counts[column] += 1
            row_name, name = names[column], f"{names[column]} {counts[column]}"
        yield {
            **card,
            "place": f"grid-row:{top} / {bottom};grid-column:{'2 / -1' if column is None else column + 2}",
            "hue": HUES[(column or 0) % len(HUES)],
            "name": name,
            "row_name": row_name,
            "passes": f"pass {end}" if end <= begin + 1 else f"{begin + 1}\u2013{end}",
            "parts": _parts(card),
            "footer": _footer(card, style),
        }


def _parts(card: Mapping[str, Any]) -> list[tuple[str, int | None, str]]:
    """Return the text of a card by pass: text, pass (None: given) and origin, without blank text around it."""
    parts: list[tuple[str, int | None, str]] = [(card["given"], None, COMPUTED)]
    for (at, origin), pieces in groupby(card["pieces"], key=lambda piece: (piece[0], piece[2])):
        parts.append(("".join(text for _, text, _ in pieces), at, origin))
    visible = [index for index, (text, _, _) in enumerate(parts) if text.strip()]
    parts = parts[visible[0] : visible[-1] + 1] if visible else []
    if parts:
        parts[0] = (parts[0][0].lstrip(), *parts[0][1:])
        parts[-1] = (parts[-1][0].rstrip(), *parts[-1][1:])
    return [part for part in parts if part[0]]


def _footer(card: Mapping[str, Any], style: Mapping[str, str]) -> str:
    done = card["ended"] in (style["final_event"], "join")
    moved = [f"into the {style['history']} after pass {_end(card)}"] if style["history"] else []
    notes = moved if done else ["unfinished"]
    if card["gone"] is not None:  # finished cards leave the history, if there is one; others leave with their worker
        notes.append(f"{'forgotten' if done and style['history'] else 'left'} after pass {card['gone']}")
    return ", ".join(notes)
