"""A transcript as one self-contained HTML page: columns against decode passes, with a card for each step.

`page.html` is the jinja2 template and `page.js` the slider. Text is escaped, and the content security policy of the
page allows no script but its own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from hf_parallel.files import JSONObject
from hf_parallel.transcript.record import DRAFTED, HOTSPOT, REPLAYED
from hf_parallel.transcript.sections import GIVEN, TranscriptStyle, check_format

PAGE = Path(__file__).with_name("page.html")
HUES = (215, 335, 35, 160, 270, 5, 95, 190)
"""Hues of the columns, in degrees."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_DIRECTIONS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls of the text direction. They are isolated in cards, and removed from names, which are parts of sentences."""
_WITHOUT_PASS = (REPLAYED, HOTSPOT)
_ORIGINS = {
    REPLAYED: "replayed from cached logits, without a forward pass",
    HOTSPOT: "sampled again at a hotspot",
    DRAFTED: "draft token, verified in the forward pass of an earlier token",
}
_SOURCES = {DRAFTED: "draft token", REPLAYED: "replayed, no pass", HOTSPOT: "sampled again, no pass", GIVEN: "given"}
"""Words about a token that follow its pass, if it has one."""
_TICKS = {"pass": "passes", "step": "steps"}
"""Units of the vertical axis, with their plural: a step is a pass, unless all rows were replayed in it."""
_VISIBILITY = {
    "live": "columns see each other's text as it is written",
    "ended": "columns see each other's finished steps",
    "never": "columns do not see each other",
}


def printable(value: object) -> str:
    """Return a value as text without characters that HTML and XML do not allow; `Markup` stays unchanged."""
    return value if isinstance(value, Markup) else _UNPRINTABLE.sub("\ufffd", str(value))


def fill(page: Path, script_of: Path | None = None, **values: object) -> str:
    """Return a template with values, which are escaped, and with the script of the same name beside it.

    The template receives the script as `script` and its hash for the content security policy as `script_hash`. It can
    include `base.css`, the style of all pages, and extend `PAGE`. `script_of`: another template, whose script it has.
    """
    script = (script_of or page).with_suffix(".js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _templates(page.parent)
        .get_template(page.name)
        .render(**values, script=Markup(script), script_hash=f"sha256-{digest}")
    )


@functools.cache
def _templates(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(transcript: object, template: Path = PAGE, **values: object) -> str:
    """Return a transcript, the dict of `ParallelOutput.to_dict` with or without `model` (a name), as an HTML page.

    A transcript of something else than a call has `facts`, pairs of value and unit, in place of numbers of tokens.
    `template` is another template that extends `PAGE`, which receives `values`, too.

    Raises `ValueError` if it is no transcript, of another version, or damaged.
    """
    run = check_format(transcript)
    try:
        return _render(run, template, values)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the transcript is damaged: {type(error).__name__} {error}") from error


def _render(run: JSONObject, template: Path, values: Mapping[str, object]) -> str:
    texts = [name for name in TranscriptStyle._fields if name != "is_one_answer"]
    style = {name: _DIRECTIONS.sub("", run["style"][name]) for name in texts}
    origins = {piece[2] for section in run["sections"] for card in section["cards"] for piece in card["pieces"]}
    speed = _speed(run)
    style["tick"] = "step" if "facts" in run or speed["passes"] != run["passes"] else "pass"
    return fill(
        template,
        script_of=PAGE,
        title=" \u00b7 ".join(filter(None, [run["mode"] or "hf_parallel", str(run.get("model", ""))])),
        style=style,
        speed=None if "facts" in run else speed,
        facts=run["facts"] if "facts" in run else _facts(run["stats"] or {}),
        visibility=_VISIBILITY.get(style["visibility"], ""),
        settings="\n".join(f"{name} = {value!r}" for name, value in run["settings"].items()),
        origins={origin: words for origin, words in _ORIGINS.items() if origin in origins},
        sections=[_section(section, style) for section in run["sections"]],
        **values,
    )


def _speed(run: JSONObject) -> dict[str, float | None]:
    """Return the numbers of generated tokens and of decode passes, and those of sequential decoding (`alone`, `ratio`).

    Only rows that are parts of one answer compare with it. Others have `rows`, their number.
    """
    cards = [card for section in run["sections"] for card in section["cards"]]
    generated = [piece for card in cards for piece in card["pieces"] if piece[2] != GIVEN]
    replayed = {at for at, _, origin in generated if at and origin in _WITHOUT_PASS}
    passes = run["passes"] - len(replayed - {at for at, _, origin in generated if origin not in _WITHOUT_PASS})
    tokens = (run["stats"] or {}).get("decoded_tokens", len(generated))
    found: dict[str, float | None] = {"tokens": tokens, "passes": passes, "rows": None, "ratio": None}
    if not tokens or passes <= 0:
        return found
    if not run["style"]["is_one_answer"]:
        return {**found, "rows": sum(len(section["columns"]) for section in run["sections"])}
    alone = tokens / len(run["sections"])
    return {**found, "alone": round(alone), "ratio": alone / passes}


def _facts(stats: JSONObject) -> list[tuple[object, str]]:
    counts = {name: stats.get(f"{name}_tokens", 0) for name in ("prefilled", "replayed")}
    facts: list[tuple[object, str]] = [(count, f"tokens {name}") for name, count in counts.items() if count]
    return [*facts, (f"{stats['kv_bytes'] / 1e6:.1f} MB", "KV cache")] if "kv_bytes" in stats else facts


def _section(section: JSONObject, style: Mapping[str, str]) -> dict[str, object]:
    """Return a section as the template needs it, with grid rows and the positions of the cards."""
    ranking = section.get("ranking", ())
    order = [*ranking, *(column for column in range(len(section["columns"])) if column not in ranking)]
    place = {column: index for index, column in enumerate(order)}
    section = {
        **section,
        "columns": [_DIRECTIONS.sub("", section["columns"][column]) for column in order],
        "cards": [{**card, "column": place.get(card["column"])} for card in section["cards"]],
        "chosen": [place[column] for column in section.get("chosen", ())],
    }
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


def _intervals(cards: Sequence[JSONObject]) -> list[tuple[int, int]]:
    """Return the rows of the grid: intervals of passes in which no card begins or ends."""
    # Cards without a pass, such as given text, have a row of their own. The last row follows the last pass.
    spans = [(card["begin"], _end(card)) for card in cards]
    bounds = sorted({0, *(at for span in spans for at in span)})
    empty = {begin for begin, end in spans if begin == end}
    return sorted([*zip(bounds, bounds[1:], strict=False), *((at, at) for at in empty), (bounds[-1], bounds[-1] + 1)])


def _end(card: JSONObject) -> int:
    """Return the pass at which a card ends; a card without tokens ends where it begins."""
    return card["begin"] if card["end"] is None else card["end"]


def _cards(
    section: JSONObject, style: Mapping[str, str], intervals: Sequence[tuple[int, int]]
) -> Iterator[dict[str, object]]:
    """Yield the cards in the order in which they began, each with the grid rows that it spans."""
    names = section["columns"]
    counts = [0] * len(names)
    for card in sorted(section["cards"], key=lambda card: (card["begin"], card["column"] is not None, card["column"])):
        column = card["column"]
        begin = card["begin"]
        end = _end(card)
        top = 1 + bisect_left(intervals, (begin, min(begin + 1, end)))
        bottom = max(top + 1, 1 + bisect_left(intervals, (end, end)))
        row_name = name = style["spanning"]
        if column is not None:
            counts[column] += 1
            row_name = names[column]
            name = f"{names[column]} {counts[column]}"
        yield {
            **card,
            "place": f"grid-row:{top} / {bottom};grid-column:{'2 / -1' if column is None else column + 2}",
            "hue": HUES[(column or 0) % len(HUES)],
            "name": name,
            "row_name": row_name,
            "passes": _passes(card, style),
            "parts": _parts(card, style),
            "is_chosen": column in section.get("chosen", ()),
            "footer": ", ".join(filter(None, ["chosen" * (column in section.get("chosen", ())), _footer(card, style)])),
        }


def _passes(card: JSONObject, style: Mapping[str, str]) -> str:
    """Return a description of the passes that computed a card's tokens, and of tokens replayed without a pass."""
    replayed = sum(origin in _WITHOUT_PASS for _, _, origin in card["pieces"])
    computed = [at for at, _, origin in card["pieces"] if origin not in (*_WITHOUT_PASS, GIVEN)]
    words = []
    if computed:
        first = computed[0]
        last = computed[-1]
        words = [f"{style['tick']} {first}" if first == last else f"{_TICKS[style['tick']]} {first}\u2013{last}"]
    return ", ".join([*words, *([f"{replayed} replayed"] if replayed else [])])


def _parts(card: JSONObject, style: Mapping[str, str]) -> list[tuple[str, int | None, str, str]]:
    """Return the text of a card by token, without blank text around it: text, pass (None: given), origin, source."""
    parts: list[tuple[str, int | None, str, str]] = [(card["given"], None, GIVEN, _SOURCES[GIVEN])]
    parts += [(text, at, origin, _source(at, origin, style)) for at, text, origin in card["pieces"]]
    visible = [index for index, (text, *_) in enumerate(parts) if text.strip()]
    parts = parts[visible[0] : visible[-1] + 1] if visible else []
    if parts:
        parts[0] = (parts[0][0].lstrip(), *parts[0][1:])
        parts[-1] = (parts[-1][0].rstrip(), *parts[-1][1:])
    return [part for part in parts if part[0]]


def _source(at: int, origin: str, style: Mapping[str, str]) -> str:
    """Return a description of a token's origin."""
    has_pass = origin not in (*_WITHOUT_PASS, GIVEN)
    return ", ".join(filter(None, [f"{style['tick']} {at}" if has_pass else "", _SOURCES.get(origin, "")]))


def _footer(card: JSONObject, style: Mapping[str, str]) -> str:
    done = card["ended"] in (style["final_event"], "join")
    moved = [f"into the {style['history']} after {style['tick']} {_end(card)}"] if style["history"] else []
    notes = moved if done else []
    if reason := card.get("end_reason", "") or "truncated" * card.get("truncated", False):
        notes.append(reason)
    elif not done:
        notes.append("unfinished")
    return ", ".join(notes)
