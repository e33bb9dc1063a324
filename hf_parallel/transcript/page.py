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
    """Return the page of a run, or of a run of agents, which has facts."""
    is_of_agents = "facts" in run
    style = {}
    for name in TranscriptStyle._fields:
        if name != "is_one_answer":
            style[name] = _DIRECTIONS.sub("", run["style"][name])
    speed = _speed(run)
    counts_steps = is_of_agents or speed["passes"] != run["passes"]
    style["tick"] = "step" if counts_steps else "pass"
    origins = {origin for card in _all_cards(run) for _, _, origin in card["pieces"]}
    titles = [run["mode"] or "hf_parallel", str(run.get("model", ""))]
    return fill(
        template,
        script_of=PAGE,
        title=" \u00b7 ".join(filter(None, titles)),
        style=style,
        speed=None if is_of_agents else speed,
        facts=run["facts"] if is_of_agents else _facts(run["stats"] or {}),
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
    sampled_passes = []
    replayed_passes = []
    for card in _all_cards(run):
        for at, _, origin in card["pieces"]:
            if origin in _WITHOUT_PASS:
                replayed_passes.append(at)
            elif origin != GIVEN:
                sampled_passes.append(at)
    # Passes at which all tokens were replayed did not run the model.
    passes = run["passes"] - len(set(replayed_passes) - set(sampled_passes) - {0})
    num_generated = len(sampled_passes) + len(replayed_passes)
    tokens = (run["stats"] or {}).get("decoded_tokens", num_generated)
    speed: dict[str, float | None] = {"tokens": tokens, "passes": passes, "rows": None, "ratio": None}
    if not tokens or passes <= 0:
        return speed
    if run["style"]["is_one_answer"]:
        alone = tokens / len(run["sections"])
        speed |= {"alone": round(alone), "ratio": alone / passes}
    else:
        speed["rows"] = sum(len(section["columns"]) for section in run["sections"])
    return speed


def _all_cards(run: JSONObject) -> list[JSONObject]:
    """Return the cards of all sections of a run."""
    cards = []
    for section in run["sections"]:
        cards += section["cards"]
    return cards


def _facts(stats: JSONObject) -> list[tuple[object, str]]:
    """Return the numbers of a call that the page shows, each with its unit."""
    facts: list[tuple[object, str]] = []
    for name in ("prefilled", "replayed"):
        tokens = stats.get(f"{name}_tokens", 0)
        if tokens:
            facts.append((tokens, f"tokens {name}"))
    if "kv_bytes" in stats:
        facts.append((f"{stats['kv_bytes'] / 1e6:.1f} MB", "KV cache"))
    return facts


def _section(section: JSONObject, style: Mapping[str, str]) -> dict[str, object]:
    """Return a section as the template needs it, with grid rows and the positions of the cards."""
    ranking = list(section.get("ranking", ()))
    unranked = [column for column in range(len(section["columns"])) if column not in ranking]
    order = ranking + unranked
    position = {column: index for index, column in enumerate(order)}
    cards = [{**card, "column": position.get(card["column"])} for card in section["cards"]]
    section = {
        **section,
        "columns": [_DIRECTIONS.sub("", section["columns"][column]) for column in order],
        "cards": cards,
        "chosen": [position[column] for column in section.get("chosen", ())],
    }
    intervals = _intervals(cards)
    heights = [min(max(16, 3 * (end - begin)), 240) for begin, end in intervals]  # pixels
    moves_at = {_end(card) for card in cards if style["history"] and card["ended"] == style["final_event"]}
    return {
        **section,
        "intervals": intervals,
        "rows": " ".join(f"minmax({height}px,auto)" for height in heights),
        "moves": [line for line, (begin, _) in enumerate(intervals, start=1) if begin in moves_at],
        "cards": list(_cards(section, style, intervals)),
        "spans": any(card["column"] is None for card in cards),
    }


def _intervals(cards: Sequence[JSONObject]) -> list[tuple[int, int]]:
    """Return the rows of the grid: intervals of passes in which no card begins or ends."""
    # Cards without a pass, such as given text, have a row of their own. The last row follows the last pass.
    bounds = {0}
    empty = set()
    for card in cards:
        begin = card["begin"]
        end = _end(card)
        bounds |= {begin, end}
        if begin == end:
            empty.add((begin, end))
    ordered = sorted(bounds)
    intervals = list(zip(ordered, ordered[1:], strict=False))
    last_row = (ordered[-1], ordered[-1] + 1)
    return sorted([*intervals, *empty, last_row])


def _end(card: JSONObject) -> int:
    """Return the pass at which a card ends; a card without tokens ends where it begins."""
    return card["begin"] if card["end"] is None else card["end"]


def _cards(
    section: JSONObject, style: Mapping[str, str], intervals: Sequence[tuple[int, int]]
) -> Iterator[dict[str, object]]:
    """Yield the cards in the order in which they began, each with the grid rows that it spans."""
    names = section["columns"]
    counts = [0] * len(names)
    spanning_first = sorted(
        section["cards"], key=lambda card: (card["begin"], card["column"] is not None, card["column"])
    )
    for card in spanning_first:
        column = card["column"]
        begin = card["begin"]
        end = _end(card)
        top = 1 + bisect_left(intervals, (begin, min(begin + 1, end)))
        bottom = max(top + 1, 1 + bisect_left(intervals, (end, end)))
        name = style["spanning"]
        row_name = name
        if column is not None:
            counts[column] += 1
            row_name = names[column]
            name = f"{names[column]} {counts[column]}"
        is_chosen = column in section.get("chosen", ())
        notes = ["chosen"] if is_chosen else []
        footer = _footer(card, style)
        if footer:
            notes.append(footer)
        grid_column = "2 / -1" if column is None else column + 2
        yield {
            **card,
            "place": f"grid-row:{top} / {bottom};grid-column:{grid_column}",
            "hue": HUES[(column or 0) % len(HUES)],
            "name": name,
            "row_name": row_name,
            "passes": _passes(card, style),
            "parts": _parts(card, style),
            "is_chosen": is_chosen,
            "footer": ", ".join(notes),
        }


def _passes(card: JSONObject, style: Mapping[str, str]) -> str:
    """Return a description of the passes that computed a card's tokens, and of tokens replayed without a pass."""
    replayed = 0
    computed = []
    for at, _, origin in card["pieces"]:
        if origin in _WITHOUT_PASS:
            replayed += 1
        elif origin != GIVEN:
            computed.append(at)
    words = []
    if computed:
        first = computed[0]
        last = computed[-1]
        if first == last:
            words.append(f"{style['tick']} {first}")
        else:
            words.append(f"{_TICKS[style['tick']]} {first}\u2013{last}")
    if replayed:
        words.append(f"{replayed} replayed")
    return ", ".join(words)


def _parts(card: JSONObject, style: Mapping[str, str]) -> list[tuple[str, int | None, str, str]]:
    """Return the text of a card by token, without blank text around it: text, pass (None: given), origin, source."""
    parts: list[tuple[str, int | None, str, str]] = []
    parts.append((card["given"], None, GIVEN, _SOURCES[GIVEN]))
    for at, text, origin in card["pieces"]:
        parts.append((text, at, origin, _source(at, origin, style)))
    while parts and not parts[0][0].strip():
        parts.pop(0)
    while parts and not parts[-1][0].strip():
        parts.pop()
    if parts:
        text, at, origin, source = parts[0]
        parts[0] = (text.lstrip(), at, origin, source)
        text, at, origin, source = parts[-1]
        parts[-1] = (text.rstrip(), at, origin, source)
    return [part for part in parts if part[0]]


def _source(at: int, origin: str, style: Mapping[str, str]) -> str:
    """Return a description of a token's origin."""
    has_pass = origin not in (*_WITHOUT_PASS, GIVEN)
    parts = [
        f"{style['tick']} {at}" if has_pass else "",
        _SOURCES.get(origin, ""),
    ]
    return ", ".join(filter(None, parts))


def _footer(card: JSONObject, style: Mapping[str, str]) -> str:
    """Return notes on how a card has ended."""
    is_finished = card["ended"] in (style["final_event"], "join")
    notes = []
    if is_finished and style["history"]:
        notes.append(f"into the {style['history']} after {style['tick']} {_end(card)}")
    reason = card.get("end_reason", "")
    if not reason and card.get("truncated", False):
        reason = "truncated"
    if reason:
        notes.append(reason)
    elif not is_finished:
        notes.append("unfinished")
    return ", ".join(notes)
