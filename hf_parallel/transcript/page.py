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
PASS_HEIGHT, MAX_HEIGHT = 3, 240
"""Minimum height of a pass and maximum height of an interval of passes without an event, in pixels."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
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


def render(run: Mapping[str, Any]) -> str:
    """Render a transcript.

    Parameters
    ----------
    run : mapping
        Return value of `ParallelOutput.to_dict`, optionally with the name of the `model`.

    Returns
    -------
    str
        A complete HTML page.

    Raises
    ------
    ValueError
        If `run` is not a transcript.
    """
    run = check_run(run)
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    origins = {piece[2] for section in run["sections"] for card in section["cards"] for piece in card["pieces"]}
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=" \u00b7 ".join(filter(None, [run["mode"] or "hf_parallel", str(run.get("model", ""))])),
            style={name: run["style"][name] for name in TranscriptStyle._fields},
            facts=_facts(run["passes"], run["stats"] or {}),
            visibility=_VISIBILITY.get(run["style"]["visibility"], ""),
            settings="\n".join(f"{name} = {value!r}" for name, value in run["settings"].items()),
            origins={origin: words for origin, words in _ORIGINS.items() if origin in origins},
            sections=[_section(section, run["style"]) for section in run["sections"]],
            script=Markup(script),
            script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: Any) -> Any:
    """Replace the characters that HTML does not allow."""
    return value if isinstance(value, Markup) else _UNPRINTABLE.sub("\ufffd", str(value))


def _facts(passes: int, stats: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Return figures of the call with their units."""
    facts: list[tuple[Any, str]] = [(passes, "decode passes")]
    for name, unit in (("decoded_tokens", "tokens decoded"), ("prefilled_tokens", "tokens prefilled")):
        facts += [(stats[name], unit)] if name in stats else []
    facts += [(stats["replayed_tokens"], "tokens replayed")] if stats.get("replayed_tokens") else []
    facts += [(f"{stats['kv_bytes'] / 1e6:.1f} MB", "KV cache")] if "kv_bytes" in stats else []
    return facts


def _section(section: Mapping[str, Any], style: Mapping[str, str]) -> dict[str, Any]:
    """Return a section as the template needs it: grid rows, cards with their places, and the rest unchanged."""
    cards = section["cards"]
    intervals = _intervals(cards)
    heights = [min(max(16, PASS_HEIGHT * (end - begin)), MAX_HEIGHT) for begin, end in intervals]
    moved = {_end(card) for card in cards if style["history"] and card["ended"] == style["final_event"]}
    return {
        **section,
        "intervals": intervals,
        "rows": " ".join(f"minmax({height}px,auto)" for height in heights),
        "moves": [line for line, (begin, _) in enumerate(intervals, start=1) if begin in moved],
        "cards": list(_cards(cards, section["columns"], style, intervals)),
        "spans": any(card["column"] is None for card in cards),
    }


def _intervals(cards: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the rows of the grid: intervals of passes in which no card begins, ends or goes.

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
    cards: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    style: Mapping[str, str],
    intervals: Sequence[tuple[int, int]],
) -> Iterator[dict[str, Any]]:
    """Yield the cards in the order in which they began, each with the grid rows that it spans."""
    counts = [0] * len(names)
    for card in sorted(cards, key=lambda card: (card["begin"], card["column"] is not None, card["column"])):
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
    notes = []
    if not done:
        notes.append("unfinished")
    elif style["history"]:
        notes.append(f"into the {style['history']} after pass {_end(card)}")
    if card["gone"] is not None:  # finished cards leave the history, if there is one; others leave with their worker
        notes.append(f"{'forgotten' if done and style['history'] else 'left'} after pass {card['gone']}")
    return ", ".join(notes)
