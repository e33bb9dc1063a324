"""Transcript of a call as plain data, for JSON and the HTML page.

A transcript has one section per prompt, a section has columns (workers, branches, completions), and a column has cards:
consecutive text of one row, such as a step or a completion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from os.path import commonprefix
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import IncrementalDetokenizer, decode
from hf_parallel.files import JSONObject
from hf_parallel.transcript.record import COMPUTED, Record

FORMAT = "hf_parallel run"
VERSION = 2
"""Values of `format` and `version` in a transcript."""
GIVEN = "g"
"""Origin of text that was inserted, not generated. `Record.origins` has the others."""


@dataclass
class Card:
    """Consecutive text of one row, such as a step or a completion."""

    column: int | None  # None: it spans all columns
    begin: int  # decode pass after which it began
    end: int | None = None  # decode pass of its last token, if it has tokens
    ended: str = ""  # event that ended it, see `ParallelStreamer`; empty: it is unfinished
    given: str = ""  # text that it began with
    pieces: list[tuple[int, str, str]] = field(default_factory=list)  # decode pass, text and origin of each token
    truncated: bool = False  # whether a token budget ended its row; only the row's last card
    end_reason: str = ""  # why its row ended early; only the row's last card


class TranscriptStyle(NamedTuple):
    """How a page shows the rows of a mode.

    `unit` names a card, and `spanning` names the row that spans all columns. `visibility` says which text of
    the other columns a row sees: `live` (all), `ended` (finished cards) or `never` (none). `final_event` finishes a
    card, which then moves to the shared text named `history` (empty: it stays in its column). `is_one_answer`: the rows
    of a prompt are parts of one answer, so that their passes compare with those of sequential decoding.
    """

    unit: str = "completion"
    spanning: str = "answer"
    visibility: str = "never"
    final_event: str = "end"
    history: str = ""
    is_one_answer: bool = False


@dataclass
class Section:
    """One prompt and its rows."""

    prompt: str | None  # None: unknown without a tokenizer
    prompt_tokens: int
    columns: list[str]
    cards: list[Card]  # in the order in which they began
    notes: list[tuple[str, str]] = field(default_factory=list)  # headings and texts shown above the columns
    ranking: list[int] = field(default_factory=list)  # columns that a page shows first, best first
    chosen: list[int] = field(default_factory=list)  # columns that the mode has chosen
    images: list[str] = field(default_factory=list)  # `data:` URLs of the thumbnails of the prompt's images
    tree: dict[str, Any] | None = None  # which row has continued which, as `tree_cells` returns it


def cards_by_prompt(record: Record) -> dict[int, list[Card]]:
    """Return the cards of each prompt from the events of a call."""
    origins = {row: iter(letters) for row, letters in record.origins.items()}
    cards_of: dict[int, list[Card]] = {}
    open_cards: dict[int, Card] = {}
    cards_by_row: dict[int, list[Card]] = {}

    def begin(row: int, at: int, text: str = "") -> Card:
        prompt, column = record.place(row)
        card = Card(column, at, given=text)
        open_cards[row] = card
        cards_of.setdefault(prompt, []).append(card)
        cards_by_row.setdefault(row, []).append(card)
        return card

    for at, row, text, event in record.events:
        card = open_cards.get(row)
        if event == "begin":
            begin(row, at, text)
        elif event in ("step", "end", "join"):
            if card is not None:
                card.ended = event
                del open_cards[row]
        else:
            began = max(at - 1, 0) if event == "token" else at
            if card is None:
                card = begin(row, began)
            origin = GIVEN
            if event == "token" and (at > 0 or row in record.origins):
                origin = next(origins.get(row, iter(())), COMPUTED)
            card.pieces.append((at, text, origin))
            card.begin = min(card.begin, began)
            card.end = at
    for row, cards in cards_by_row.items():
        written = _with_text(cards)
        if written:
            written[-1].truncated = row in record.truncated
            written[-1].end_reason = record.end_reasons.get(row, "")
    return {prompt: _with_text(cards) for prompt, cards in cards_of.items()}


def _with_text(cards: Sequence[Card]) -> list[Card]:
    return [card for card in cards if card.given or card.pieces]


def column_names(record: Record, prompt: int, cards: Sequence[Card]) -> list[str]:
    """Return names for the columns of a prompt's cards, after the rows that wrote them."""
    config = record.config
    names = {}
    for row in {event.row for event in record.events}:
        position = config.rows.place(row, len(record.prompts))
        if position.prompt == prompt:
            _, column = record.place(row)
            names[column] = config.rows.name(position.index)
    count = 1 + max((card.column or 0 for card in cards), default=0)
    unit = config.rows.style.unit
    return [names.get(column, f"{unit} {column + 1}") for column in range(count)]


def separate_overlapping(cards: Sequence[Card], columns: list[str], name: str) -> None:
    """Move cards that span all columns to a column of their own if any of them overlaps another card in time."""
    spanning = [card for card in cards if card.column is None]
    in_columns = [card for card in cards if card.column is not None and card.end is not None]
    if any(_overlap(card, other) for card in spanning for other in in_columns):
        for card in spanning:
            card.column = len(columns)
        columns.append(name)


def _overlap(card: Card, other: Card) -> bool:
    """Whether a card, which may have no end yet, and one that has ended overlap in time."""
    assert other.end is not None
    end = card.begin if card.end is None else card.end
    return other.begin < end and card.begin < other.end


def completion_sections(
    record: Record, sequences: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[Section]:
    """Return the sections of a mode that streams no text.

    `sequences` are lists of tokens, padded on both sides. Rows of one prompt share a section. If the mode draws one row
    per prompt and all prompts differ, all rows share one.
    """
    draws_several = record.config.rows.drawn_per_prompt > 1
    drawn = record.returned or range(len(sequences))
    positions = [record.config.rows.place(row, len(record.prompts)) for row in drawn]
    prompts = [record.prompts[position.prompt].tolist() for position in positions]
    images = [record.images_of([position.prompt]) for position in positions]
    by_prompt = groupby(range(len(prompts)), key=lambda row: (prompts[row], images[row]))
    groups = [list(rows) for _, rows in by_prompt]
    if not draws_several and len(groups) == len(prompts) > 1:
        groups = [list(range(len(prompts)))]
    hidden = record.hidden_tokens(tokenizer)
    sections = []
    for rows in groups:
        shared = commonprefix([prompts[row] for row in rows])
        prompt = decode(tokenizer, shared)
        cards = []
        for column, row in enumerate(rows):
            tokens = sequences[row][record.begin : record.lengths[row]]
            own_prompt = decode(tokenizer, prompts[row][len(shared) :])
            text = IncrementalDetokenizer(tokenizer, hidden)
            card = _completion(column, own_prompt, tokens, record.origins.get(drawn[row], ""), text)
            card.truncated = drawn[row] in record.truncated
            card.end_reason = record.end_reasons.get(drawn[row], "")
            cards.append(card)
        names = [record.config.rows.name(positions[row].index) for row in rows]
        if not draws_several or len(set(names)) < len(names):
            names = [f"completion {number}" for number in range(1, len(rows) + 1)]
        shown = record.images_of(positions[row].prompt for row in rows)
        sections.append(Section(prompt, len(shared), names, cards, images=shown))
    return sections


def _completion(column: int, given: str, tokens: Sequence[int], origins: str, text: IncrementalDetokenizer) -> Card:
    """Return the card of a row, whose tokens `text` decodes; only computed tokens advance its decode pass."""
    card = Card(column, 0, ended="end", given=given)
    at = 0
    for index, token in enumerate(tokens):
        origin = origins[index] if index < len(origins) else COMPUTED
        at += origin == COMPUTED
        card.pieces.append((at, text.add([token]), origin))
        card.end = at
    return card


def transcript_dict(record: Record, stats: Any, sections: Sequence[Section]) -> dict[str, Any]:
    """Return a transcript as plain data; settings that JSON cannot hold are left out."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "mode": record.mode,
        "settings": {name: value for name, value in record.settings.items() if is_plain(value)},
        "stats": None if stats is None else stats.to_dict(),
        "passes": record.passes,
        "style": record.config.rows.style._asdict(),
        "sections": [asdict(section) for section in sections],
    }


def is_plain(value: object) -> bool:
    """Return whether JSON can hold a value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def check_format(run: object) -> JSONObject:
    """Return a transcript that was read from a file. Raises `ValueError` for other data and other versions."""
    if not isinstance(run, Mapping) or run.get("format") != FORMAT:
        raise ValueError(f"not a transcript: it must be a JSON object whose 'format' is {FORMAT!r}")
    if run.get("version") != VERSION:
        raise ValueError(f"the transcript has version {run.get('version')!r}, but only version {VERSION} can be read")
    return run
