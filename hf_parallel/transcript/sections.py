"""Transcripts: what the rows of a call wrote at which pass, as plain data that goes into JSON and onto a page.

A transcript has a section per prompt; a section has columns (workers, branches, completions), and a column has cards:
what a row wrote in one go. Knows the record of a call and tokenizers, nothing of modes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from os.path import commonprefix
from typing import Any, NamedTuple

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.transcript.record import COMPUTED, Record

FORMAT, VERSION = "hf_parallel run", 1
"""What a file of a transcript begins with."""
GIVEN = "g"
"""Where a piece comes from that nobody generated; see `Record.origins` for the others."""

Place = Callable[[int], tuple[int, int | None]]
"""Says of a row which prompt it belongs to, and its column; None: it is written across all of them."""


@dataclass
class Card:
    """What a row wrote in one go, such as a step.

    Attributes
    ----------
    column : int or None
        None: across all columns.
    begin : int
        The decode pass behind which it began; 0: before the first.
    end : int or None
        The decode pass that wrote its last token; None: it wrote none.
    ended : str
        The event that ended it (see `ParallelStreamer`); empty: none did.
    given : str
        Text that it began with.
    pieces : list of (int, str, str)
        What each token added: the pass that wrote it, its text, and where it comes from.
    gone : int or None
        The decode pass behind which nobody reads it any more: it was forgotten, or left with its worker.
    """

    column: int | None
    begin: int
    end: int | None = None
    ended: str = ""
    given: str = ""
    pieces: list[tuple[int, str, str]] = field(default_factory=list)
    gone: int | None = None


class TranscriptStyle(NamedTuple):
    """How a mode lets its rows write, in the words of a page.

    `unit` is what a card is called, and `across` who writes across all columns. Columns read each other `live` (as it
    is written), `ended` (finished cards alone) or `never`: that is `sight`. The event `done` finishes a card, which
    then moves into what `past` names, if anything.
    """

    unit: str = "completion"
    across: str = "answer"
    sight: str = "never"
    done: str = "end"
    past: str = ""


@dataclass
class Section:
    """One prompt, and what was written from it.

    Attributes
    ----------
    prompt : str or None
        None: it is not known as text.
    prompt_tokens : int
    columns : list of str
        Their names.
    cards : list of Card
        In the order in which they began.
    notes : list of (str, str)
        Headings and texts of what else is to be said.
    """

    prompt: str | None
    prompt_tokens: int
    columns: list[str]
    cards: list[Card]
    notes: list[tuple[str, str]] = field(default_factory=list)


def written_cards(record: Record, place: Place, steps_stay: bool = True) -> dict[int, list[Card]]:
    """The cards of each prompt, from the events of a call; `steps_stay`: finished ones do when their worker leaves."""
    origins = {row: iter(letters) for row, letters in record.origins.items()}
    found: dict[int, list[Card]] = {}
    open_cards: dict[int, Card] = {}
    of_rows: dict[int, list[Card]] = {}

    def begin(row: int, at: int, text: str = "") -> Card:
        prompt, column = place(row)
        card = open_cards[row] = Card(column, at, given=text)
        found.setdefault(prompt, []).append(card)
        of_rows.setdefault(row, []).append(card)
        return card

    for at, row, text, event in record.events:
        card = open_cards.get(row)
        if event == "begin":
            begin(row, at, text)
        elif event in ("step", "end", "join"):
            if card is not None:
                card.ended = event
                del open_cards[row]
        elif event in ("forget", "leave"):
            there = [card for card in of_rows.get(row, []) if card.gone is None]
            steps = [card for card in there if card.ended == "step"]
            left = [card for card in there if not (steps_stay and card.ended == "step")]
            for card in [steps[int(text)]] if event == "forget" else left:
                card.gone = at
        else:
            before = max(at - 1, 0) if event == "token" else at
            card = card or begin(row, before)
            generated = event == "token" and (at > 0 or row in record.origins)
            card.pieces.append((at, text, next(origins.get(row, iter(())), COMPUTED) if generated else GIVEN))
            card.begin, card.end = min(card.begin, before), at
    return {prompt: [card for card in cards if card.given or card.pieces] for prompt, cards in found.items()}


def beside(cards: Sequence[Card], columns: list[str], name: str) -> None:
    """Give what is written across columns one of its own if it was not written in turn with them."""
    across = [card for card in cards if card.column is None]
    spans = [(card.begin, card.end) for card in cards if card.column is not None and card.end is not None]
    ends = [(card, card.begin if card.end is None else card.end) for card in across]
    if any(begin < last and card.begin < end for card, last in ends for begin, end in spans):
        for card in across:
            card.column = len(columns)
        columns.append(name)


def completed_sections(record: Record, sequences: Sequence[Sequence[int]], tokenizer: Any) -> list[Section]:
    """Sections of a mode that writes no text: rows of one prompt side by side, or all rows if each has its own.

    Parameters
    ----------
    record : Record
    sequences : list per row of list of int
        Prompts and completions, padded on both sides.
    tokenizer
        Of the model.
    """
    prompts = [prompt.tolist() for prompt in record.prompts]
    groups = [list(rows) for _, rows in groupby(range(len(prompts)), key=prompts.__getitem__)]
    if len(groups) == len(prompts) > 1:
        groups = [list(range(len(prompts)))]
    sections = []
    for rows in groups:
        shared = commonprefix([prompts[row] for row in rows])
        cards = []
        for column, row in enumerate(rows):
            tokens = sequences[row][record.begin : record.lengths[row]]
            own = tokenizer.decode(prompts[row][len(shared) :])
            cards.append(_completion(column, own, tokens, record.origins.get(row, ""), tokenizer))
        names = [f"completion {number}" for number in range(1, len(rows) + 1)]
        sections.append(Section(tokenizer.decode(shared), len(shared), names, cards))
    return sections


def _completion(column: int, own: str, tokens: Sequence[int], origins: str, tokenizer: Any) -> Card:
    """The card of a row; what it replayed was there before the first pass."""
    card, text = Card(column, 0, ended="end", given=own), IncrementalDetokenizer(tokenizer)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    at = 0
    for place, token in enumerate(tokens):
        origin = origins[place] if place < len(origins) else COMPUTED
        at += origin == COMPUTED
        card.pieces.append((at, "" if token in special else text.add([token]), origin))
        card.end = at
    return card


def as_dict(record: Record, stats: Any, style: TranscriptStyle, sections: Sequence[Section]) -> dict[str, Any]:
    """A transcript as plain data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "mode": record.mode,
        "settings": {name: value for name, value in record.settings.items() if _is_plain(value)},
        "stats": None if stats is None else stats.to_dict(),
        "passes": record.passes,
        "style": style._asdict(),
        "sections": [asdict(section) for section in sections],
    }


def _is_plain(value: Any) -> bool:
    """Whether a setting is data, and no object of the process."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def check_run(run: Any) -> Mapping[str, Any]:
    """Return a transcript that was read from a file, if it is one.

    Raises
    ------
    ValueError
        Saying what is wrong with it.
    """
    if not isinstance(run, Mapping) or run.get("format") != FORMAT:
        raise ValueError(f"no transcript: it must be a JSON object whose 'format' is {FORMAT!r}")
    if run.get("version") != VERSION:
        raise ValueError(f"a transcript of version {run.get('version')!r}, this program reads version {VERSION}")
    try:
        for section in run["sections"]:
            _check_section(section)
        words = [run["mode"], *(run["style"][name] for name in TranscriptStyle._fields)]
        _expect(all(isinstance(word, str) for word in words) and isinstance(run["passes"], int))
        _expect(isinstance(run["settings"], Mapping) and isinstance(run["stats"], Mapping | None))
        _expect(isinstance((run["stats"] or {}).get("kv_bytes", 0), int))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a transcript that is damaged: {type(error).__name__} {error}") from error
    return run


def _check_section(section: Any) -> None:
    """Raise an error unless a section has what a page shows, of the right types."""
    names = section["columns"]
    _expect(isinstance(section["prompt"], str | None) and isinstance(section["prompt_tokens"], int))
    _expect(all(isinstance(name, str) for name in names))
    for heading, text in section["notes"]:
        _expect(isinstance(heading, str) and isinstance(text, str))
    for card in section["cards"]:
        column, begin, end = card["column"], card["begin"], card["end"]
        _expect(column is None or (isinstance(column, int) and 0 <= column < len(names)))
        _expect(isinstance(begin, int) and (end is None or (isinstance(end, int) and end >= begin >= 0)))
        gone = card.get("gone")  # an older transcript does not tell it
        _expect(gone is None or (isinstance(gone, int) and gone >= (begin if end is None else end)))
        _expect(isinstance(card["given"], str) and isinstance(card["ended"], str))
        for at, text, origin in card["pieces"]:
            _expect(isinstance(at, int) and begin <= at <= end and isinstance(text, str) and isinstance(origin, str))


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError("a value has the wrong type or lies outside its range")
