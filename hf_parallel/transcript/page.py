"""One self-contained page of HTML that shows a transcript: columns against forward passes, cards in their places.

`page.html` holds the frame and the looks, `page.js` the slider. The text of a model is escaped, and the page allows no
script but its own, whatever a model has written.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from hf_parallel.transcript.record import COMPUTED, DRAFTED, HOTSPOT, REPLAYED
from hf_parallel.transcript.sections import TranscriptStyle, check_run

FEW_COLUMNS = 2
"""So many stay side by side on a narrow screen; more stand one below the other there."""
HUES = (215, 335, 35, 160, 270, 5, 95, 190)
"""Of the columns, in degrees."""
PASS_HEIGHT, MOST_HEIGHT = 3, 240
"""Pixels that a pass takes at least, and that a stretch of passes without an event needs at most."""
OPEN_PROMPT = 400
"""Characters up to which a prompt is shown without a click."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_ORIGINS = {
    REPLAYED: "replayed: the logits were remembered, the model did not run",
    HOTSPOT: "drawn anew at a hotspot",
    DRAFTED: "drafted: computed in the pass of the token before it",
}
_SIGHTS = {
    "live": "columns read each other as they are written",
    "ended": "columns read each other's finished steps",
    "never": "columns do not read each other",
}


def render(run: Mapping[str, Any]) -> str:
    """Show a transcript.

    Parameters
    ----------
    run : mapping
        What `ParallelOutput.to_dict` gives. It may also have a `model`, its name.

    Returns
    -------
    str
        A whole page of HTML.

    Raises
    ------
    ValueError
        If `run` is no transcript.
    """
    run = check_run(run)
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = _escape(" \u00b7 ".join(filter(None, [run["mode"] or "hf_parallel", str(run.get("model", ""))])))
    several = len(run["sections"]) > 1
    parts = [_facts(run), _settings(run) if run["settings"] else "", _key(run)]
    for number, section in enumerate(run["sections"], start=1):
        heading = f"<h2>Prompt {number}</h2>" if several else ""
        parts.append(_section(section, run["style"], heading))
    style = " ".join(f'data-{name}="{_escape(run["style"][name])}"' for name in TranscriptStyle._fields)
    body = f"<div {style}>" + "\n".join(parts) + "</div>"
    return Template(_file("page.html")).substitute(
        title=title, body=body, script=script, script_hash=f"sha256-{digest}"
    )


def _facts(run: Mapping[str, Any]) -> str:
    """What was asked and what it cost, in a line."""
    stats = run["stats"] or {}
    facts = [(run["passes"], "decode passes")]
    for name, words in (("decoded_tokens", "tokens written"), ("prefilled_tokens", "given tokens computed")):
        facts += [(stats[name], words)] if name in stats else []
    facts += [(stats["replayed_tokens"], "replayed")] if stats.get("replayed_tokens") else []
    told = [f"<b>{_escape(value)}</b> {words}" for value, words in facts]
    if "kv_bytes" in stats:
        told.append(f"<b>{stats['kv_bytes'] / 1e6:.1f} MB</b> of keys and values")
    told.append(_SIGHTS.get(run["style"]["sight"], ""))
    return f'<p class="facts">{"; ".join(filter(None, told))}</p>'


def _settings(run: Mapping[str, Any]) -> str:
    """The settings that were given."""
    return _details("Settings", "\n".join(f"{name} = {value!r}" for name, value in run["settings"].items()), "")


def _key(run: Mapping[str, Any]) -> str:
    """What the colours mean, if there are any."""
    pieces = (piece for section in run["sections"] for card in section["cards"] for piece in card["pieces"])
    used = {origin for _, _, origin in pieces}
    words = [f'<span data-o="{origin}">{words}</span>' for origin, words in _ORIGINS.items() if origin in used]
    return f'<p class="facts key">{" ".join(words)}</p>' if words else ""


def _section(section: Mapping[str, Any], style: Mapping[str, str], heading: str) -> str:
    across, names, cards = style["across"], section["columns"], section["cards"]
    stretches = _stretches(cards)
    parts = ["<section>", heading, _prompt(section), _bar(names, cards, across, stretches[-1][0])]
    rows = " ".join(_row(begin, end) for begin, end in stretches)
    kind = "few" if len(names) <= FEW_COLUMNS else "many"
    parts.append(
        f'<div class="scroll {kind}"><div class="grid" style="--columns:{len(names)};grid-template-rows:{rows}">'
    )
    for line, (begin, end) in enumerate(stretches, start=1):
        data, label = f'data-from="{begin}" data-to="{end}"', "" if begin == end else begin
        parts.append(f'<button class="tick" tabindex="-1" style="grid-row:{line}" {data}>{label}</button>')
    moved = {_end(card) for card in cards if style["past"] and card["ended"] == style["done"]}
    for line, (begin, _) in enumerate(stretches, start=1):
        if begin in moved:
            parts.append(f'<div class="moves" style="grid-row:{line}"></div>')
    parts += _cards(cards, names, style, stretches)
    parts.append("</div></div>")
    parts += [_note(label, text) for label, text in section["notes"]]
    return "\n".join(filter(None, [*parts, "</section>"]))


def _stretches(cards: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The rows of the grid: passes between which no card begins, ends or goes.

    What took no pass, such as text that was given, has a row of its own before those that took some. The last row is
    what comes after the last pass.
    """
    spans = [(card["begin"], _end(card)) for card in cards]
    gone = [card["gone"] for card in cards if card.get("gone") is not None]
    places = sorted({0, *gone, *(at for span in spans for at in span)})
    empty = {begin for begin, end in spans if begin == end}
    return sorted([*zip(places, places[1:], strict=False), *((at, at) for at in empty), (places[-1], places[-1] + 1)])


def _row(begin: int, end: int) -> str:
    """Height of a stretch of passes: as much as the cards in it need, and more for more passes."""
    return f"minmax({min(max(16, PASS_HEIGHT * (end - begin)), MOST_HEIGHT)}px,auto)"


def _end(card: Mapping[str, Any]) -> int:
    """The pass at which a card ends; one that nothing was written into ends where it begins."""
    return card["begin"] if card["end"] is None else card["end"]


def _prompt(section: Mapping[str, Any]) -> str:
    tokens = f"{section['prompt_tokens']} tokens"
    if section["prompt"] is None:
        return f'<p class="facts">A prompt of {tokens}.</p>'
    shown = " open" if len(section["prompt"]) <= OPEN_PROMPT else ""
    return _details(f"Prompt, {tokens}", section["prompt"], shown)


def _note(label: str, text: str) -> str:
    return _details(label, text, " open" if len(text) <= OPEN_PROMPT else "")


def _details(heading: str, text: str, shown: str) -> str:
    return f'<details{shown}><summary>{_escape(heading)}</summary><div class="text">{_escape(text)}</div></details>'


def _bar(names: Sequence[str], cards: Sequence[Mapping[str, Any]], across: str, last: int) -> str:
    """The slider, who looks, and a line for what is there; shown by the script."""
    options = ['<option value="all">everything</option>']
    options += [f'<option value="{column}">{_escape(name)}</option>' for column, name in enumerate(names)]
    if any(card["column"] is None for card in cards):
        options.append(f'<option value="">{_escape(across)}</option>')
    return (
        '<div class="bar" hidden><label class="slide">After pass <output></output>'
        f'<input type="range" min="0" max="{last}" value="{last}"></label>'
        f"<label>Show what is read by <select>{''.join(options)}</select></label>"
        '<p class="says" role="status"></p></div>'
    )


def _cards(
    cards: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    style: Mapping[str, str],
    stretches: Sequence[tuple[int, int]],
) -> Iterable[str]:
    """The cards in the order in which they began; each spans the stretches of passes in which it was written."""
    numbers = [0] * len(names)
    for card in sorted(cards, key=lambda card: (card["begin"], card["column"] is not None, card["column"])):
        column, begin, end = card["column"], card["begin"], _end(card)
        top = 1 + bisect_left(stretches, (begin, min(begin + 1, end)))
        bottom = max(top + 1, 1 + bisect_left(stretches, (end, end)))
        if column is None:
            who = name = style["across"]
            kind, place = "card across", "2 / -1"
        else:
            numbers[column] += 1
            who, kind, place = names[column], "card", str(column + 2)
            name = f"{who} {numbers[column]}"
        style = f"grid-row:{top} / {bottom};grid-column:{place};--h:{HUES[(column or 0) % len(HUES)]}"
        data = {"c": _or_empty(column), "b": begin, "e": _or_empty(card["end"]), "s": card["ended"]}
        data["g"] = _or_empty(card.get("gone"))
        told = " ".join(f'data-{key}="{_escape(value)}"' for key, value in {**data, "n": name, "who": who}.items())
        when = f"pass {end}" if end <= begin + 1 else f"{begin + 1}\u2013{end}"
        yield (
            f'<article class="{kind}" style="{style}" {told}><h3>{_escape(who)}<span>{when}</span></h3>'
            f"<p>{_text(card)}</p>{_footer(card, style)}</article>"
        )


def _or_empty(value: Any) -> Any:
    return "" if value is None else value


def _text(card: Mapping[str, Any]) -> str:
    """What a card says, without blank lines around; each pass's part is an element of its own."""
    parts: list[tuple[str, str]] = [("i", card["given"])]
    for (at, origin), pieces in groupby(card["pieces"], key=lambda piece: (piece[0], piece[2])):
        mark = f' data-o="{_escape(origin)}"' if origin != COMPUTED else ""
        parts.append((f'span data-p="{at}"{mark}', "".join(piece[1] for piece in pieces)))
    written = [place for place, (_, text) in enumerate(parts) if text.strip()]
    parts = parts[written[0] : written[-1] + 1] if written else []
    if parts:
        parts[0] = (parts[0][0], parts[0][1].lstrip())
        parts[-1] = (parts[-1][0], parts[-1][1].rstrip())
    return "".join(f"<{tag}>{_escape(text)}</{tag.split()[0]}>" for tag, text in parts if text)


def _footer(card: Mapping[str, Any], style: Mapping[str, str]) -> str:
    done, gone, told = card["ended"] in (style["done"], "join"), card.get("gone"), []
    if not done:
        told.append("unfinished")
    elif style["past"]:
        told.append(f"into the {_escape(style['past'])} after pass {_end(card)}")
    if gone is not None:  # what is finished is forgotten where there is a history that it could leave
        told.append(f"{'forgotten' if done and style['past'] else 'left'} after pass {gone}")
    return f"<footer>{', '.join(told)}</footer>" if told else ""


def _escape(value: Any) -> str:
    """Text for HTML, inside elements and attributes; what no page may hold becomes a replacement character."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(value)))


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
