"""What a call of `generate` keeps of how it came about, so that an output can tell it: who wrote what, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

COMPUTED, DRAFTED, REPLAYED, HOTSPOT = "m", "d", "r", "h"
"""Where a token comes from: the model ran, it ran once for this token and the one before, its logits were remembered,
they were and it was drawn at a hotspot."""


class Event(NamedTuple):
    """What a row wrote, as a `ParallelStreamer` is told it; `forward_pass` counts decode passes, 0 is before them.

    Two events come from sessions alone, and no streamer hears of them: `forget` (a finished step of the row leaves the
    history; `text` is its place among those that the row has there) and `leave` (the row's worker is removed).
    """

    forward_pass: int
    row: int
    text: str
    event: str


@dataclass(eq=False)
class Record:
    """How one call came about.

    Attributes
    ----------
    config : ParallelConfig
        That of the call; None outside of a mode.
    settings : dict
        Those of the mode that were given.
    prompts : list of int64 arrays
        What each row of the batch followed from, without padding.
    begin : int
        Tokens of a row of `sequences` that are its prompt and padding.
    lengths : list of int
        Tokens that each row of `sequences` has, padding behind it not counted.
    passes : int
        Decode passes: how often rows were given tokens.
    events : list of Event
        Empty in modes that write no text.
    origins : dict of int to str
        For rows over a LogitsCache a letter for each of its new tokens: `m` (the model ran), `d` (it was a draft in the
        pass that gave the token before, see `draft_tokens`), `r` (replayed) or `h` (replayed, and drawn anew at a
        hotspot).
    """

    config: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: Sequence[np.ndarray] = ()
    begin: int = 0
    lengths: list[int] = field(default_factory=list)
    passes: int = 0
    events: list[Event] = field(default_factory=list)
    origins: dict[int, str] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return "" if self.config is None else self.config.mode

    def place(self, row: int) -> tuple[int, int | None]:
        """The prompt that a row belongs to, and its column; None: it spans all columns."""
        place = self.config.place(row, len(self.prompts))
        return place.prompt, place.column

    def write(self, row: int, text: str, event: str) -> None:
        """Keep what a row wrote, or what became of it; see `Event`."""
        self.events.append(Event(self.passes, row, text, event))

    def came_from(self, origins: Mapping[int, Sequence[str]], rows: Mapping[int, int] | None = None) -> None:
        """Keep where more tokens of rows come from; `rows` says which rows they are, where the numbers differ."""
        for index, letters in origins.items():
            row = index if rows is None else rows[index]
            self.origins[row] = self.origins.get(row, "") + "".join(letters)
