"""Replays cached logits before the model runs, and caches the logits that the model returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.cache.logits import LogitsCache, TrieNode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.resampling.drafts import LONGEST, NgramDrafter
from hf_parallel.generation.resampling.foresight import DraftSampler
from hf_parallel.generation.resampling.policies import ReplayPolicy, uncertainty_at
from hf_parallel.generation.resampling.prefetch import HOST, DistributionCache, Prefetch
from hf_parallel.generation.sampling import Sampler
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels.linear import computed_by
from hf_parallel.transcript.record import COMPUTED, DRAFTED, HOTSPOT, REPLAYED

_LOCAL = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
"""Processors for which the highest logits may be enough."""


@dataclass(eq=False)
class _Route:
    """A remembered continuation: the tokens that were taken, and which of them are drawn anew."""

    states: list[TrieNode]
    tokens: list[int]
    draws: np.ndarray
    place: int = 0

    def leads_over(self, state: TrieNode) -> bool:
        """Whether it goes on from a state."""
        return self.place < len(self.states) and self.states[self.place] is state

    @property
    def token(self) -> int:
        """What was taken here."""
        return self.tokens[self.place]

    @property
    def is_hotspot(self) -> bool:
        """Whether a token is drawn here although one was taken before."""
        return self.place < len(self.tokens) and bool(self.draws[self.place])

    @property
    def draws_here(self) -> bool:
        """Whether a token is drawn here; where nothing has been taken there is no other way."""
        return self.place >= len(self.tokens) or bool(self.draws[self.place])


@dataclass(eq=False)
class Replayer:
    """Replays and remembers the rows of one call.

    Parameters
    ----------
    cache : LogitsCache
    policy : ReplayPolicy
    call : GenerationCall
    sampler : Sampler
        Draws replayed tokens as it draws others: with the same processors, criteria and noise.
    stats : GenerationStats
        Counts what was replayed.
    prefetch : bool, optional
        Whether the sampling work of later replays is done ahead while the model runs. Default: where the model runs on
        another device than the host.
    draft_tokens : int, optional
        See `SharedPrefixConfig`.

    Raises
    ------
    ValueError
        If the cache keeps fewer logits than the call's settings need.

    Attributes
    ----------
    origins : dict of int to list of str
        Where the tokens of each row come from, see `Record`.
    """

    cache: LogitsCache
    policy: ReplayPolicy
    call: GenerationCall
    sampler: Sampler
    stats: GenerationStats
    prefetch: bool | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        self._needed = _needed(self.cache, self.call)
        self._key = fingerprint(self.call.model)
        self.origins: dict[int, list[str]] = {}
        self._routes: dict[int, _Route] = {}
        self._replayed: dict[int, int] = {}  # tokens of each row
        self._rows: set[int] = set()  # those that stand on a state
        self._recognised: set[int] = set()  # those whose next token is chosen from what is remembered
        self._distributions = DistributionCache(self.cache, self.sampler)
        ahead = self.call.model.device.type != "cpu" if self.prefetch is None else self.prefetch
        self._prefetch = Prefetch(self._distributions, self.policy.looks_ahead) if ahead else None

    @contextmanager
    def walking(self, prompts: Sequence[np.ndarray] = ()) -> Iterator[None]:
        """Stand on the prompts of rows; what rows stand on is not dropped meanwhile.

        Parameters
        ----------
        prompts : sequence of int64 arrays
            Of rows 0, 1, ...; others come to their states by `arrive`.
        """
        with self.cache.cursors() as self._cursors:
            for row, prompt in enumerate(prompts):
                self._cursors.start(row, self._key, prompt.tolist())
                self._rows.add(row)
            starts = {self._cursors.state(row): self.sampler.table.lengths[row] for row in self._rows}
            self._prompts = list(starts)
            with nullcontext() if self._prefetch is None else self._prefetch.ready(starts):
                yield

    def replay(
        self, rows: Sequence[int], take: Callable[[Sequence[int], Sequence[int], Sequence[bool]], Sequence[int]]
    ) -> list[int]:
        """Take tokens for `rows` as long as it is remembered what follows.

        Parameters
        ----------
        rows : sequence of int
            Ascending.
        take : callable (rows, tokens, ended) -> rows
            Told what was taken and whether a criterion ended the row, it says which rows go on.

        Returns
        -------
        list of int
            The rows that go on.
        """
        going, walking = set(rows), list(rows)
        while walking := self._walkers(walking):
            staying = list(take(walking, *self.choose(walking)))
            going -= set(walking) - set(staying)
            walking = staying
        if going and self._prefetch is not None:
            self._prefetch.start()
        return sorted(going)

    def _walkers(self, rows: Sequence[int]) -> list[int]:
        """The rows that take their next token from what is remembered, before the model runs.

        Helpers that keep state per row see all rows at each step, as without a cache: these go together or not at all.
        """
        if self.sampler.in_step:
            return list(rows) if rows and self.recognise(rows) else []
        return [row for row in rows if self.recognise([row])]

    def drafts(self) -> NgramDrafter | None:
        """Where to look up what rows may write next; None where that is not wanted, or would change what is drawn."""
        most, on_host = self.draft_tokens, self.call.model.device.type in HOST
        if most is None:
            most = LONGEST if on_host else 0
        if not (most and self.sampler.draws_apart):
            return None
        settings = (self._key, self.policy.name, self._distributions.settings)
        # A GPU waits for weights, as the kernel does; nothing was measured there.
        by = computed_by(self.call.model) if on_host else "native"
        drafts = NgramDrafter(self.cache, most, settings, self._foresight(), frozenset(self.call.eos_token_ids), by)
        for prompt in self._prompts:
            drafts.read(prompt)
        return drafts

    def _foresight(self) -> DraftSampler | None:
        """Draws ahead, where rows draw with noise of their own."""
        if not (self.sampler.do_sample and self.sampler.has_own_noise):
            return None
        temperature = self.call.generation_config.temperature
        return DraftSampler(self.sampler, self._distributions, 1.0 if temperature is None else temperature)

    def state(self, row: int) -> TrieNode:
        """The state of all tokens that a row has."""
        return self._cursors.state(row)

    def arrive(self, rows: Sequence[int], names: Sequence[int]) -> bool:
        """Let rows of a group come to states that hang on more than their own tokens; see `recognise`.

        Parameters
        ----------
        rows : sequence of int
        names : sequence of int
            Negative, one for each row: what its next state is called among those behind its last token.
        """
        for row, name in zip(rows, names, strict=True):
            if row in self._rows:
                self._cursors.follow(row, name)
            else:
                self._cursors.start(row, self._key, [name])
                self._rows.add(row)
        return self.recognise(rows)

    def recognise(self, rows: Sequence[int]) -> bool:
        """Whether it is remembered what follows for all of `rows`; if so their next tokens are chosen by that."""
        known = [self._known(row) for row in rows]
        if not all(known):
            return False
        self._recognised.update(rows)
        return True

    def choose(
        self, rows: Sequence[int], logits: torch.Tensor | None = None, drafted: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Take the next token of each of `rows`, and remember what the model gave.

        Parameters
        ----------
        rows : sequence of int
            Ascending.
        logits : [n, vocabulary], optional
            What the model gave for the n rows that were not recognised.
        drafted : bool
            Whether it gave that in the pass in which it gave what came before, too.

        Returns
        -------
        (tokens, ended) : list of int, list of bool
        """
        computed = [row for row in rows if row not in self._recognised]
        if computed:
            assert logits is not None, "what is not remembered has been computed"
            self._remember(computed, logits)
        kept = {} if computed else self._surely_kept(rows)
        asking = [row for row in rows if row not in kept]
        chosen: dict[int, tuple[int, bool]] = {}
        if asking:
            weights = self._weigh(asking, logits)
            kept |= self._kept(asking, weights)
            drawing = [i for i, row in enumerate(asking) if row not in kept]
            of = [asking[i] for i in drawing]
            if of:
                drawn = self.sampler.draw_from(of, weights[drawing] if len(of) < len(asking) else weights)
                chosen.update(zip(of, zip(*self.sampler.read(self.sampler.fetch(*drawn)), strict=True), strict=True))
        if kept:
            of = sorted(kept)
            ended = self.sampler.accept(of, [kept[row] for row in of])
            chosen.update((row, (kept[row], end)) for row, end in zip(of, ended, strict=True))
        for row in rows:
            self._follow(row, chosen[row][0], drafted)
        self._recognised.difference_update(rows)
        return [chosen[row][0] for row in rows], [chosen[row][1] for row in rows]

    def _surely_kept(self, rows: Sequence[int]) -> dict[int, int]:
        """Of `_kept`, the rows whose token was taken under the same settings; what it was drawn from need not be asked.

        The rows have been recognised.
        """
        if not self.policy.looks_ahead:
            return {}
        staying = [row for row in rows if not self._draws(row)]
        tokens = {row: self._route(row).token for row in staying}
        following = {row: self._cursors.state(row).children.get(token) for row, token in tokens.items()}
        lengths = self.sampler.table.lengths
        return {row: tokens[row] for row in staying if self._distributions.may_take_again(following[row], lengths[row])}

    def _kept(self, rows: Sequence[int], weights: torch.Tensor) -> dict[int, int]:
        """The rows that take the token that was taken before; not one that the settings of this call rule out."""
        places = [i for i, row in enumerate(rows) if row in self._recognised and not self._draws(row)]
        if not places:
            return {}
        tokens = [self._route(rows[i]).token for i in places]
        possible = weights[places, tokens] > (0.0 if self.sampler.do_sample else -torch.inf)
        return {rows[i]: token for i, token, may in zip(places, tokens, possible.tolist(), strict=True) if may}

    def _weigh(self, rows: Sequence[int], logits: torch.Tensor | None) -> torch.Tensor:
        """What the next tokens of rows are drawn from; `logits` are those of the rows that were not recognised."""
        known = [i for i, row in enumerate(rows) if row in self._recognised]
        if len(known) == len(rows):
            return self._distributions.of(rows, [self._cursors.state(row) for row in rows])
        assert logits is not None, "what is not remembered has been computed"
        if not known:
            weights = self.sampler.weigh(rows, logits)
            self._distributions.note(rows, [self._cursors.state(row) for row in rows], weights)
            return weights
        together = logits.new_empty(len(rows), logits.shape[-1], dtype=torch.float32)
        together[known] = torch.stack([self._logits(rows[i]) for i in known]).to(together)
        together[[i for i, row in enumerate(rows) if row not in self._recognised]] = logits
        return self.sampler.weigh(rows, together)

    def _remember(self, rows: Sequence[int], logits: torch.Tensor) -> None:
        """Keep what the model gave behind the tokens of `rows`, `[len(rows), vocabulary]`."""
        new = [i for i, row in enumerate(rows) if not self._cursors.known(row)]
        if new:
            given = logits if len(new) == len(rows) else logits[new]
            for i, kept in zip(new, given.cpu(), strict=True):
                self._cursors.remember(rows[i], kept)

    def _follow(self, row: int, token: int, drafted: bool) -> None:
        """Go on by the token that a row has taken."""
        if self._prefetch is not None and row not in self._recognised:
            self._prefetch.tell(self._cursors.state(row))
        self.origins.setdefault(row, []).append(self._origin(row, drafted))
        self._cursors.follow(row, token)
        self._distributions.note_taken(self._cursors.state(row), self.sampler.table.lengths[row] - 1)
        if row in self._recognised:
            self.stats.replayed_tokens += 1
            self._replayed[row] = self._replayed.get(row, 0) + 1
            if row in self._routes:
                self._routes[row].place += 1

    def _origin(self, row: int, drafted: bool) -> str:
        """Where the token comes from that a row has taken: see `Record.origins`."""
        if row not in self._recognised:
            return DRAFTED if drafted else COMPUTED
        route = self._routes.get(row)
        return HOTSPOT if route is not None and route.is_hotspot else REPLAYED

    def _known(self, row: int) -> bool:
        return self._cursors.ask(row, *self._needed)

    def _logits(self, row: int) -> torch.Tensor:
        remembered = self._cursors.state(row).logits
        assert remembered is not None, "asked only where they are known"
        return remembered.spread()

    def _draws(self, row: int) -> bool:
        """Whether the row's next token is drawn."""
        return not self.policy.looks_ahead or self._route(row).draws_here

    def _route(self, row: int) -> _Route:
        """The continuation that was taken last from where the row is."""
        state, route = self._cursors.state(row), self._routes.get(row)
        if route is None or not route.leads_over(state):
            states, tokens, uncertainty = _last_taken(self.cache, state)
            draws = self.policy.draws(np.array(uncertainty), self._replayed.get(row, 0))
            route = self._routes[row] = _Route(states, tokens, np.asarray(draws, dtype=bool))
        return route


def _last_taken(cache: LogitsCache, state: TrieNode) -> tuple[list[TrieNode], list[int], list[float]]:
    """From a state on, the continuation that was taken last, as far as logits are known: states, tokens, uncertainty.

    Other threads may add to it and drop of it meanwhile.
    """
    states, tokens, uncertainty = [], [], []
    while (following := cache.taken_last(state)) is not None:
        logits = state.logits
        if logits is not None:
            states.append(state)
            tokens.append(following.token)
            uncertainty.append(uncertainty_at(state, logits))
        elif following.token >= 0:
            break  # what follows is unknown; states of groups have names between their tokens, which nothing follows
        state = following
    return states, tokens, uncertainty


def _needed(cache: LogitsCache, call: GenerationCall) -> tuple[int, float]:
    """How many of the highest logits the call's settings need, and the log of the mass that all others may have.

    Raises
    ------
    ValueError
        If no state that has forgotten some can serve.
    """
    config, processors = call.generation_config, call.logits_processor
    if cache.top_k is None:
        return 0, np.inf
    shown = config.return_dict_in_generate and (config.output_logits or config.output_scores)
    if not shown and all(type(processor) in _LOCAL for processor in processors):
        if not config.do_sample:
            return 1, np.inf
        # The first that cuts decides, what follows it sees nothing else; a temperature changes what masses are.
        first = next((p for p in processors if type(p) is not TemperatureLogitsWarper), None)
        if isinstance(first, TopKLogitsWarper) and first.top_k <= cache.top_k:
            return first.top_k, np.inf
        if isinstance(first, TopPLogitsWarper) and processors[0] is first:
            return first.min_tokens_to_keep, float(np.log1p(-first.top_p))
    names = sorted(type(processor).__name__ for processor in processors)
    raise ValueError(
        f"logits_cache keeps the {cache.top_k} highest logits (top_k), which is enough for greedy decoding, for "
        f"sampling with top_k of at most {cache.top_k}, or with top_p at temperature 1, and not for output_logits or "
        f"output_scores; got {names} with do_sample={config.do_sample}, temperature={config.temperature}, "
        f"top_k={config.top_k}, top_p={config.top_p}, output_logits={config.output_logits}, "
        f"output_scores={config.output_scores}"
    )
