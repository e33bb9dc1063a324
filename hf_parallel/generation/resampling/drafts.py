"""NgramDrafter: what a row may write next, for one forward pass to compute on trial.

A row that has left the remembered states soon writes words again that other samples of its prompt wrote, or the
prompt, or itself. What follows them there goes into the row's next pass, behind its own token: what was taken, or what
the row's own noise draws from the logits that are remembered. Then each token is drawn as ever, from the model's logits
and with the row's noise, and as long as the draws are the draft, a pass serves several. No sample changes. (Speculative
decoding with looked-up drafts; as the noise is fixed, to accept is to be equal.)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import WeakKeyDictionary

from hf_parallel.cache.logits import LogitsCache, TrieNode
from hf_parallel.kernels.linear import pass_cost

LONGEST = 15
"""Tokens of a draft, at most."""
FIRST_CHANCES = {8: 0.8, 5: 0.7, 3: 0.6, 2: 0.5, 1: 0.3}
"""How many last tokens of a row may be looked up, the most that are found decide; and how often what was found there is
drawn if nobody knows, where no other token was found. What one token tells is little, and often enough where a pass of
several tokens is cheap: chances are learned for each number."""
MATCHES = tuple(FIRST_CHANCES)
FIRST_CHANCE_OF_TWO = 0.25
"""And where two were found, the chance of each."""
MOST_STATES = 4096
"""States below a prompt in which drafts are looked up, those that were visited last."""
LEAST_GAIN = 0.1
"""What a draft must save at least, in passes of one token: chances are not known that well."""
LEAST_CHANCE = 0.05
"""A token that is less likely to be reached is not looked for."""
MOST_GUESSING = 4
"""Rows of a pass for which tokens are drawn ahead: each takes about 0.1 ms, and many share a pass."""
MOST_SETTINGS = 64
"""Settings of which chances are kept beside a cache, those that were used last."""
_FORGETTING = 0.95

TAKEN, GUESSED, BOTH, ALONE = "taken", "guessed", "both", "alone"
"""How a token was found: taken there before, or guessed, where the two differ; both; or taken, where nothing was
guessed."""

Guess = Callable[[int, TrieNode, int], int | None]
"""(row, state, ahead): the token that a row would draw so many tokens from here from what is remembered of a state."""


@dataclass
class _Chance:
    """How often what was looked up has been drawn of late."""

    looked: float
    drawn: float

    @classmethod
    def first(cls, count: int, how: str) -> _Chance:
        """As long as nobody knows: as if it had been looked up four times."""
        return cls(4.0, 4.0 * (FIRST_CHANCE_OF_TWO if how in (TAKEN, GUESSED) else FIRST_CHANCES[count]))

    def learn(self, drawn: bool) -> None:
        self.looked = _FORGETTING * self.looked + 1.0
        self.drawn = _FORGETTING * self.drawn + drawn

    @property
    def value(self) -> float:
        return self.drawn / self.looked


@dataclass(frozen=True)
class _Found:
    """What may be a row's next token.

    Attributes
    ----------
    count : int
        Last tokens of the row that were the same where it was found.
    tokens : dict of str to int
        By how they were found.
    likeliest : str
        Which of them goes into a draft.
    """

    count: int
    tokens: dict[str, int]
    likeliest: str

    @property
    def token(self) -> int:
        return self.tokens[self.likeliest]


_learning = threading.Lock()
_learned: WeakKeyDictionary[LogitsCache, dict[Hashable, dict[tuple[int, str], _Chance]]] = WeakKeyDictionary()


@dataclass(eq=False)
class NgramDrafter:
    """Looks up what rows may write next, and learns how often they do.

    Parameters
    ----------
    cache : LogitsCache
    most : int
        Tokens of a draft, at most.
    settings : hashable, optional
        What tokens are drawn by: what was learned of it over the same cache is known from the first token on.
    guess : callable (row, state, ahead) -> token or None, optional
        See `Guess`; nothing that it says changes what is drawn.
    ends : set of int, optional
        Tokens behind which a row writes nothing.
    computed_by : str, optional
        What passes are computed by, on which hangs how long they may be; see `pass_cost`.
    """

    cache: LogitsCache
    most: int = LONGEST
    settings: Hashable = None
    guess: Guess | None = None
    ends: frozenset[int] = frozenset()
    computed_by: str = "native"
    _places: dict[tuple[int, ...], TrieNode] = field(default_factory=dict)
    _told: dict[int, list[_Found]] = field(default_factory=dict)  # by row

    def __post_init__(self) -> None:
        with _learning:
            of_cache = _learned.setdefault(self.cache, {})
            kinds = itertools.product(MATCHES, (TAKEN, GUESSED, BOTH, ALONE))
            new = {(count, how): _Chance.first(count, how) for count, how in kinds}
            self._chances = of_cache[self.settings] = of_cache.pop(self.settings, new)  # the last in order now
            if len(of_cache) > MOST_SETTINGS:
                del of_cache[next(iter(of_cache))]

    def read(self, prompt: TrieNode) -> None:
        """Learn what there is in a prompt, and remembered below it."""
        path = [prompt]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        read = [(state, _last_tokens(state)) for state in reversed(path)]
        below: list[tuple[TrieNode, tuple[int, ...]]] = []
        stack = read[-1:]
        while stack and len(below) < MOST_STATES:
            state, tokens = stack.pop()
            children = sorted(self.cache.children(state), key=attrgetter("used"))
            following = [
                (child, (*tokens, child.token)[-MATCHES[0] :] if child.token >= 0 else ()) for child in children
            ]
            below += following
            stack += following
        for state, tokens in [*read, *sorted(below, key=lambda known: known[0].used)]:  # the last one stays
            if _leads_on(state, self.guess):
                self._note(state, tokens)

    def note(self, state: TrieNode) -> None:
        """Learn that a state's last tokens may be followed by what follows it."""
        self._note(state, _last_tokens(state))

    def _note(self, state: TrieNode, tokens: tuple[int, ...]) -> None:
        for count in MATCHES:
            if len(tokens) >= count:
                self._places[tokens[-count:]] = state

    def find(self, row: int, state: TrieNode, num_rows: int, room: int) -> list[int]:
        """What a row may write next that stands on a state, if it is worth to compute it.

        Parameters
        ----------
        row : int
        state : TrieNode
        num_rows : int
            Rows of the pass.
        room : int
            Tokens that it may have at most.
        """
        guess = self.guess if num_rows <= MOST_GUESSING else None
        self._told[row] = told = self._look_ahead(row, state, min(self.most, room), guess)
        chances = [self._chance(found.count, found.likeliest).value for found in told]
        length = _worth(chances, num_rows, self.computed_by)
        return [found.token for found in told[:length]]

    def see(self, row: int, state: TrieNode) -> None:
        """Learn from the token by which a row has come to a state."""
        told = self._told.pop(row, [])
        if told:
            for how, token in told[0].tokens.items():
                self._chance(told[0].count, how).learn(token == state.token)
            if told[0].token == state.token:
                self._told[row] = told[1:]

    def _look_ahead(self, row: int, state: TrieNode, room: int, guess: Guess | None) -> list[_Found]:
        """What a row may write next that stands on a state, as far as that is likely enough."""
        tokens, likely = _last_tokens(state), 1.0
        told: list[_Found] = []
        place, count = self._look_up(tokens, guess)
        while place is not None and len(told) < room and likely >= LEAST_CHANCE:
            known = {child.token: child for child in self.cache.children(place) if child.token >= 0}
            guessed = guess(row, place, len(told)) if guess is not None else None
            found = self._choose(count, known, guessed)
            if found is None:  # another thread has dropped what was known
                break
            told.append(found)
            if found.token in self.ends:
                break
            likely *= self._chance(count, found.likeliest).value
            tokens = (*tokens, found.token)[-MATCHES[0] :]
            place, count = known.get(found.token), count + 1
            other, alike = self._look_up(tokens, guess)
            if place is None or not _leads_on(place, guess) or alike > count:
                place, count = other, alike
        return told

    def _look_up(self, tokens: tuple[int, ...], guess: Guess | None) -> tuple[TrieNode | None, int]:
        """Where a row with the same last tokens stood that tells what may follow, and how many were the same."""
        for count in MATCHES:
            place = self._places.get(tokens[-count:]) if len(tokens) >= count else None
            if place is not None and _leads_on(place, guess):
                return place, count
        return None, 0

    def _choose(self, count: int, known: dict[int, TrieNode], guessed: int | None) -> _Found | None:
        """What may follow a place: of its known continuations the one taken last, or what is guessed."""
        taken = max(known, key=lambda token: known[token].used, default=None)
        if taken is None:
            tokens = {} if guessed is None else {GUESSED: guessed}
        elif guessed is None:
            tokens = {ALONE: taken}
        else:
            tokens = {BOTH: taken} if taken == guessed else {TAKEN: taken, GUESSED: guessed}
        if not tokens:
            return None
        return _Found(count, tokens, max(tokens, key=lambda how: self._chance(count, how).value))

    def _chance(self, count: int, how: str) -> _Chance:
        return self._chances[next(known for known in MATCHES if known <= count), how]


def _leads_on(state: TrieNode, guess: Guess | None) -> bool:
    """Whether it is known what followed a state, or can be guessed."""
    return bool(state.children) or (guess is not None and state.logits is not None)


def _worth(chances: Sequence[float], num_rows: int, computed_by: str) -> int:
    """Tokens of a draft that save most time: passes that they make needless, less what they cost."""
    saved, likely, best, length = 0.0, 1.0, LEAST_GAIN, 0
    without = pass_cost(num_rows, computed_by)
    for tokens, chance in enumerate(chances, start=1):
        likely *= chance
        saved += likely * without
        gain = saved - pass_cost(num_rows * (1 + tokens), computed_by) + without
        if gain > best:
            best, length = gain, tokens
    return length


def _last_tokens(state: TrieNode) -> tuple[int, ...]:
    tokens: list[int] = []
    place: TrieNode | None = state
    while place is not None and place.token >= 0 and len(tokens) < MATCHES[0]:
        tokens.append(place.token)
        place = place.parent
    return tuple(reversed(tokens))
