"""Recall: what a LogitsCache does for one call. It replays before the model runs and remembers what the model gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..cache.logits import LogitsCache, State
from .call import GenerationCall
from .fingerprint import fingerprint
from .replay import ReplayPolicy, uncertainty_of
from .sampling import Sampler

_LOCAL = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
"""Processors for which the highest logits may be enough."""


@dataclass(eq=False)
class _Route:
    """A remembered continuation: the tokens that were taken, and which of them are drawn anew."""

    states: list[State]
    tokens: list[int]
    draws: np.ndarray
    place: int = 0


@dataclass(eq=False)
class Recall:
    """Replays and remembers the rows of one call.

    Parameters
    ----------
    cache : LogitsCache
    policy : ReplayPolicy
    call : GenerationCall
    sampler : Sampler
        Draws replayed tokens as it draws others: with the same processors, criteria and noise.

    Raises
    ------
    ValueError
        If the cache keeps fewer logits than the call's settings need.
    """

    cache: LogitsCache
    policy: ReplayPolicy
    call: GenerationCall
    sampler: Sampler
    replayed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._most_rest = _most_rest(self.cache, self.call)
        self._key = fingerprint(self.call.model)
        self._routes: dict[int, _Route | None] = {}

    @contextmanager
    def walking(self, rows: Sequence[int]) -> Iterator[None]:
        """Stand on the prompts of the call's rows; what they stand on is not dropped meanwhile."""
        with self.cache.cursors() as self._cursors:
            for row in rows:
                self._cursors.start(row, self._key, self.call.prompts[row].tolist())
            yield

    def replay(self, rows: Sequence[int], show: Callable[[Sequence[int], Sequence[int]], None]) -> list[int]:
        """Take tokens for `rows` as long as it is remembered what follows.

        Parameters
        ----------
        rows : sequence of int
            Ascending.
        show : callable (rows, tokens)
            Told what was taken.

        Returns
        -------
        list of int
            The rows that have not ended.
        """
        going, walking = set(rows), list(rows)
        while walking := [row for row in walking if self._known(row)]:
            drawing = [row for row in walking if self._draws(row)]
            keeping = [row for row in walking if row not in set(drawing)]
            ended: list[int] = []
            if drawing:
                logits = torch.stack([self._logits(row) for row in drawing])
                tokens, ends = self.sampler.choose(drawing, logits)
                ended += self._take(drawing, tokens, ends)
                show(drawing, tokens)
            if keeping:
                logits = torch.stack([self._logits(row) for row in keeping])
                tokens = [self._route(row).tokens[self._route(row).place] for row in keeping]
                ended += self._take(keeping, tokens, self.sampler.accept(keeping, tokens, logits))
                show(keeping, tokens)
            going -= set(ended)
            walking = [row for row in walking if row in going]
        return sorted(going)

    def remember(self, rows: Sequence[int], logits: torch.Tensor) -> None:
        """Keep what the model gave behind the tokens of `rows`, `[len(rows), vocabulary]`."""
        new = [i for i, row in enumerate(rows) if not self._cursors.known(row)]
        if new:
            for i, kept in zip(new, logits[new].cpu(), strict=True):
                self._cursors.remember(rows[i], kept)

    def follow(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Go on by the tokens that `rows` have taken."""
        for row, token in zip(rows, tokens, strict=True):
            self._cursors.follow(row, token)

    def _take(self, rows: Sequence[int], tokens: Sequence[int], ended: Sequence[bool]) -> list[int]:
        self.follow(rows, tokens)
        for row, token in zip(rows, tokens, strict=True):
            self.replayed[row] = self.replayed.get(row, 0) + 1
            route = self._routes.get(row)
            if route is not None:
                route.place += 1
                if route.place > len(route.tokens) or token != route.tokens[route.place - 1]:
                    self._routes[row] = None  # another continuation from here on
        return [row for row, end in zip(rows, ended, strict=True) if end]

    def _known(self, row: int) -> bool:
        state = self._cursors.state(row)
        enough = state.logits is None or state.logits.rest <= self._most_rest
        return enough and self._cursors.logits(row) is not None

    def _logits(self, row: int) -> torch.Tensor:
        remembered = self._cursors.state(row).logits
        assert remembered is not None, "asked only where they are known"
        return remembered.spread()

    def _draws(self, row: int) -> bool:
        """Whether the row's next token is drawn."""
        if not self.policy.looks_ahead:
            return True
        route = self._route(row)
        return route.place >= len(route.tokens) or bool(route.draws[route.place])

    def _route(self, row: int) -> _Route:
        """The continuation that was taken last from where the row is."""
        route = self._routes.get(row)
        if route is None:
            states, tokens = _last_taken(self._cursors.state(row))
            uncertainty = np.array([_uncertainty(state) for state in states])
            draws = self.policy.draws(uncertainty, self.replayed.get(row, 0))
            route = self._routes[row] = _Route(states, tokens, np.asarray(draws, dtype=bool))
        return route


def _last_taken(state: State) -> tuple[list[State], list[int]]:
    """From a state on, the states and tokens of the continuation that was taken last, as far as logits are known."""
    states, tokens = [], []
    while state.logits is not None and state.children:
        following = max(state.children.values(), key=lambda child: child.used)
        states.append(state)
        tokens.append(following.token)
        state = following
    return states, tokens


def _uncertainty(state: State) -> float:
    if state.uncertainty is None:
        assert state.logits is not None, "a route is of states with logits"
        state.uncertainty = uncertainty_of(state.logits.spread())
    return state.uncertainty


def _most_rest(cache: LogitsCache, call: GenerationCall) -> float:
    """Log of the mass of forgotten logits with which a state still serves the call's settings; infinite: any.

    Raises
    ------
    ValueError
        If no state that has forgotten some can serve.
    """
    config, processors = call.generation_config, call.logits_processor
    if cache.top_k is None:
        return np.inf
    names = [type(processor).__name__ for processor in processors]
    if all(name in _LOCAL for name in names):
        if not config.do_sample:
            return np.inf
        found: dict[str, Any] = dict(zip(names, processors, strict=True))
        if "TopKLogitsWarper" in found and found["TopKLogitsWarper"].top_k <= cache.top_k:
            return np.inf
        if names == ["TopPLogitsWarper"]:  # at temperature 1 the mass of what was forgotten is known
            return float(np.log1p(-found["TopPLogitsWarper"].top_p))
    raise ValueError(
        f"logits_cache keeps the {cache.top_k} highest logits (top_k), which is enough for greedy decoding, for "
        f"sampling with top_k of at most {cache.top_k}, or with top_p at temperature 1; got {sorted(names)} with "
        f"do_sample={config.do_sample}, temperature={config.temperature}, top_k={config.top_k}, top_p={config.top_p}"
    )
