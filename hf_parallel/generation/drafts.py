"""Drafts: what a row may write next, for one forward pass to compute on trial.

A row that has left the remembered states soon writes words again that other samples of its prompt wrote, or the
prompt, or itself. What followed them there goes into the row's next pass, behind its own token. Then each of its tokens
is drawn as ever, from the model's logits and with its own noise, and as long as the draws are the draft, a pass serves
several. No sample changes. (Speculative decoding with looked-up drafts; as the noise is fixed, to accept is to be
equal.)
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ..cache.logits import LogitsCache, State

LONGEST = 15
"""Tokens of a draft, at most."""
MATCHES = (8, 5, 3, 2, 1)
"""How many last tokens of a row may be looked up; the most that are found decide. What one token tells is little, and
often enough where a pass of several tokens is cheap: chances are learned for each number."""
MOST_STATES = 4096
"""States below a prompt in which drafts are looked up, those that were visited last."""
SECOND_TOKEN, EACH_TOKEN = 0.2, 1 / 45
"""What a pass of several tokens takes more than one of a single token, and what each of its tokens adds, in passes of a
single token: so measured on a host, in float32, with linear layers by oneDNN (docs/cpu.md)."""
LEAST_GAIN = 0.1
"""What a draft must save at least, in passes of one token: chances are not known that well."""
MOST_SETTINGS = 64
"""Settings of which chances are kept beside a cache, those that were used last."""
_FORGETTING = 0.95


@dataclass
class _Chance:
    """How often what was looked up has been drawn of late; seldom, as long as nobody knows."""

    looked: float = 4.0
    drawn: float = 1.0

    def learn(self, drawn: bool) -> None:
        self.looked = _FORGETTING * self.looked + 1.0
        self.drawn = _FORGETTING * self.drawn + drawn

    @property
    def value(self) -> float:
        return self.drawn / self.looked


_learning = threading.Lock()
_learned: WeakKeyDictionary[LogitsCache, dict[Hashable, dict[int, _Chance]]] = WeakKeyDictionary()


@dataclass(eq=False)
class Drafts:
    """Looks up what rows may write next, and learns how often they do.

    Parameters
    ----------
    cache : LogitsCache
    most : int
        Tokens of a draft, at most.
    settings : hashable, optional
        What tokens are drawn by: what was learned of it over the same cache is known from the first token on.
    """

    cache: LogitsCache
    most: int = LONGEST
    settings: Hashable = None
    _places: dict[tuple[int, ...], State] = field(default_factory=dict)
    _told: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by row: tokens matched, what may follow

    def __post_init__(self) -> None:
        with _learning:
            of_cache = _learned.setdefault(self.cache, {})
            new = {count: _Chance() for count in MATCHES}
            self._chances = of_cache[self.settings] = of_cache.pop(self.settings, new)  # the last in order now
            if len(of_cache) > MOST_SETTINGS:
                del of_cache[next(iter(of_cache))]

    def read(self, prompt: State) -> None:
        """Learn what there is in a prompt, and remembered below it."""
        path = [prompt]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        below: list[State] = []
        stack = [prompt]
        while stack and len(below) < MOST_STATES:
            children = sorted(self.cache.children(stack.pop()), key=lambda state: state.used)
            below += children
            stack += children
        for state in [*reversed(path), *sorted(below, key=lambda state: state.used)]:  # the last one stays
            self.note(state)

    def note(self, state: State) -> None:
        """Learn that a state's last tokens may be followed by what follows it."""
        tokens = _last_tokens(state)
        for count in MATCHES:
            if len(tokens) >= count:
                self._places[tokens[-count:]] = state

    def find(self, row: int, state: State, num_rows: int, room: int) -> list[int]:
        """What a row may write next that stands on a state, if it is worth to compute it.

        Parameters
        ----------
        row : int
        state : State
        num_rows : int
            Rows of the pass.
        room : int
            Tokens that it may have at most.
        """
        tokens = _last_tokens(state)
        self._told.pop(row, None)
        for count in MATCHES:
            place = self._places.get(tokens[-count:]) if len(tokens) >= count else None
            draft = [] if place is None else self._following(place, min(self.most, room))
            if draft:
                self._told[row] = count, draft
                return draft[: self._worth(count, len(draft), num_rows)]
        return []

    def see(self, row: int, state: State) -> None:
        """Learn from the token by which a row has come to a state."""
        if row not in self._told:
            return
        count, draft = self._told.pop(row)
        drawn = state.token == draft[0]
        self._chance(count).learn(drawn)
        if drawn and draft[1:]:
            self._told[row] = count + 1, draft[1:]

    def _following(self, place: State, room: int) -> list[int]:
        """What was taken last from a state on."""
        draft: list[int] = []
        while len(draft) < room and (following := self.cache.taken_last(place)) is not None and following.token >= 0:
            place = following
            draft.append(place.token)
        return draft

    def _worth(self, count: int, most: int, num_rows: int) -> int:
        """Tokens of a draft that save most time: passes that they make needless, less what they cost."""
        saved, likely, best, length = 0.0, 1.0, LEAST_GAIN, 0
        for tokens in range(1, most + 1):
            likely *= self._chance(count + tokens - 1).value
            saved += likely * _cost(num_rows)
            gain = saved - _cost(num_rows * (1 + tokens)) + _cost(num_rows)
            if gain > best:
                best, length = gain, tokens
        return length

    def _chance(self, count: int) -> _Chance:
        return self._chances[next(known for known in MATCHES if known <= count)]


def _cost(tokens: int) -> float:
    """How long a pass takes, in passes of one token."""
    return 1.0 if tokens == 1 else 1.0 + SECOND_TOKEN + EACH_TOKEN * tokens


def _last_tokens(state: State) -> tuple[int, ...]:
    tokens: list[int] = []
    place: State | None = state
    while place is not None and place.token >= 0 and len(tokens) < MATCHES[0]:
        tokens.append(place.token)
        place = place.parent
    return tuple(reversed(tokens))
