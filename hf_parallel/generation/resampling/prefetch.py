"""Prefetch: the sampling work of later replays, done ahead of them while the model decodes (Hive, section 6.3).

Hive draws the samples of the next visit in advance. Here a sample's noise hangs on its seed, which the next visit
brings, so all is done but the draw: what tokens are drawn from, and the uncertainty that replay policies look at.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from transformers import LogitsProcessor

from hf_parallel.cache.cached_logits import CachedDistribution, CachedLogits
from hf_parallel.cache.logits import LogitsCache, TrieNode
from hf_parallel.generation.resampling.policies import uncertainty_at
from hf_parallel.generation.sampling import MinLengthProcessor, Sampler

MOST_STATES = 4096
"""States that are worked on ahead in one call."""

HOST = ("cpu",)
"""Kinds of devices from which a distribution is kept at once; from others that would wait for a copy at every step."""

_CUTTING = (
    "EpsilonLogitsWarper",
    "MinPLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
)
"""Processors of Transformers that leave few tokens to draw from, and take longer than the draw.

Others (`eta_cutoff`, `typical_p`) sum over the vocabulary, in an order that hangs on the number of rows.
"""

_OF_LENGTH = (MinLengthProcessor.__name__,)
"""Those that look at how many tokens there are, but not at which."""

_OF_LOGITS = (
    *_CUTTING,
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
)
"""Those that look at nothing but logits."""

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DistributionCache:
    """What the tokens of one call are drawn from: worked out once, then kept beside the logits for later replays.

    Kept is what few tokens may be drawn from (`top_k`, `top_p` and the like), where the call's processors look at
    nothing but logits and length. A softmax of all tokens takes less than the draw and as much memory as the logits, so
    it is not kept.

    Parameters
    ----------
    cache : LogitsCache
    sampler : Sampler

    Attributes
    ----------
    kept : bool
        Whether any are kept.
    settings : str
        What they are made by: the device, and the processors with their settings.
    """

    cache: LogitsCache
    sampler: Sampler

    def __post_init__(self) -> None:
        self._device = self.sampler.table.ids.device
        processors = self.sampler.processors
        names = [_name(processor) for processor in processors]
        records = self.sampler.scores is not None or self.sampler.logits is not None
        pure = all(name in _OF_LOGITS or name in _OF_LENGTH for name in names)
        self._pure = pure and not records
        self.kept = self.sampler.do_sample and self._pure and any(name in _CUTTING for name in names)
        self.settings = repr((str(self._device), [_described(processor) for processor in processors]))
        self._least = [processor.min_length for processor in processors if isinstance(processor, MinLengthProcessor)]
        # Interned: states hold them, those of calls with the same settings the same ones.
        ended = itertools.product((False, True), repeat=len(self._least))
        self._made = {may_end: sys.intern(f"{self.settings} {may_end}") for may_end in ended}

    def of(self, rows: Sequence[int], states: Sequence[TrieNode]) -> torch.Tensor:
        """What the next tokens of `rows`, which stand on `states`, are drawn from; see `Sampler.weigh`."""
        lengths = [self.sampler.table.lengths[row] for row in rows]
        known = [self.find(state, length) for state, length in zip(states, lengths, strict=True)]
        new = [i for i, distribution in enumerate(known) if distribution is None]
        weights = None
        if new:
            logits = torch.stack([_logits(states[i]) for i in new])
            weights = self.sampler.weigh([rows[i] for i in new], logits)
            for i, shares in zip(new, weights, strict=True):
                self.keep(states[i], lengths[i], shares)
            if len(new) == len(rows):
                return weights
        vocabulary = next(state.logits.vocabulary for state in states if state.logits is not None)
        together = torch.zeros(len(rows), vocabulary, device=self._device)
        if weights is not None:
            together[new] = weights
        for into, distribution in zip(together, known, strict=True):
            if distribution is not None:
                distribution.put(into)
        return together

    def note(self, rows: Sequence[int], states: Sequence[TrieNode], weights: torch.Tensor) -> None:
        """Keep what `rows` draw from at the first visit of `states`, `[len(rows), vocabulary]`, if that is at hand."""
        if self.kept and self._device.type in HOST:
            for row, state, shares in zip(rows, states, weights, strict=True):
                length = self.sampler.table.lengths[row]
                if self.find(state, length) is None:
                    self.keep(state, length, shares)

    def find(self, state: TrieNode, length: int) -> CachedDistribution | None:
        """What is kept for a row of `length` tokens on a state, if it was made by the settings of this call."""
        kept = state.distribution if self.kept else None
        return kept if kept is not None and kept.settings == self._made_by(length) else None

    def similar(self, state: TrieNode) -> CachedDistribution | None:
        """As `find`, for a row of any length; rows of two lengths may differ in whether a text may end."""
        kept = state.distribution if self.kept else None
        if kept is None:
            return None
        return kept if kept.settings in self._made.values() else None

    def keep(self, state: TrieNode, length: int, shares: torch.Tensor) -> CachedDistribution | None:
        """Keep probabilities `[vocabulary]` beside the logits of a state, if they are few and there is room."""
        distribution = CachedDistribution.of(shares, self._made_by(length)) if self.kept else None
        if distribution is not None:
            self.cache.prepare(state, distribution)
        return distribution

    def ahead(self, state: TrieNode, logits: CachedLogits, length: int) -> CachedDistribution | None:
        """As `find`, worked out and kept if it was not; for other threads than the one that decodes."""
        found = self.find(state, length)
        return found or self.keep(state, length, self.sampler.weigh_ahead(logits.spread(), length))

    def note_taken(self, state: TrieNode, length: int) -> None:
        """Note that a row of `length` tokens has taken the last token of a state."""
        if self._pure:
            state.taken_by = self._made_by(length)

    def may_take_again(self, state: TrieNode | None, length: int) -> bool:
        """Whether a row of `length` tokens may take the last token of a state, as one did under the same settings."""
        return self._pure and state is not None and state.taken_by == self._made_by(length)

    def _made_by(self, length: int) -> str:
        """The settings, and whether a text of `length` tokens may end: of the length nothing else counts."""
        return self._made[tuple(length >= least for least in self._least)]


class Prefetch:
    """A thread that works on the states which later replays are likely to visit, likeliest first.

    A replay begins where this call began, so the states are those below the prompts of its rows: what was remembered
    before and what this call adds. How likely one is follows from the distributions on the way to it; its surprise is
    the negative logarithm of that.

    Parameters
    ----------
    distributions : DistributionCache
    uncertainty : bool
        Whether the replay policy will ask for it.
    """

    def __init__(self, distributions: DistributionCache, uncertainty: bool) -> None:
        self._distributions, self._uncertainty = distributions, uncertainty
        self._likely: list[tuple[float, int, TrieNode, int]] = []  # heap of (surprise, order, state, length)
        self._order = itertools.count()
        self._starts: dict[TrieNode, int] = {}
        self._seen: dict[
            TrieNode, tuple[float, int, CachedDistribution | None]
        ] = {}  # surprise, length, what is drawn from
        self._news: SimpleQueue[TrieNode | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_parallel prefetch", daemon=True)

    @contextmanager
    def ready(self, starts: dict[TrieNode, int]) -> Iterator[None]:
        """Be ready to `start` below states at which rows have so many tokens; the thread ends with the context."""
        self._starts = starts
        for state in starts:
            self._add(state, 0.0, starts[state])
        try:
            yield
        finally:
            self._closed.set()
            self._news.put(None)
            if self._thread.ident is not None:
                self._thread.join()

    def start(self) -> None:
        """Begin, if there is anything to do; asked again it goes on."""
        if (self._distributions.kept or self._uncertainty) and self._thread.ident is None:
            self._thread.start()

    def tell(self, state: TrieNode) -> None:
        """Say that the logits of a state are known from now on."""
        if self._thread.is_alive():
            self._news.put(state)

    def _run(self) -> None:
        device = self._distributions.sampler.table.ids.device
        beside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        try:
            with torch.no_grad(), beside:
                while not self._closed.is_set() and len(self._seen) < MOST_STATES:
                    self._read_news()
                    if self._likely:
                        self._visit(*heapq.heappop(self._likely))
        except RuntimeError as error:
            _logger.warning("prefetch has stopped, replays work out by themselves what they need: %s", error)

    def _read_news(self) -> None:
        """Take in what was told; waits for it if there is nothing else to do."""
        try:
            while (state := self._news.get(block=not self._likely)) is not None:
                if state in self._starts:
                    self._add(state, 0.0, self._starts[state])
                elif state.parent in self._seen:  # others are found from their parents
                    self._add_below(state.parent, state)
        except Empty:
            pass

    def _visit(self, surprise: float, _: int, state: TrieNode, length: int) -> None:
        logits = state.logits  # another thread may drop the state meanwhile
        if state in self._seen or logits is None:
            return
        distribution = self._distributions.ahead(state, logits, length) if self._distributions.kept else None
        if self._uncertainty:
            uncertainty_at(state, logits)
        self._seen[state] = surprise, length, distribution
        for child in self._distributions.cache.children(state):
            self._add_below(state, child)

    def _add_below(self, parent: TrieNode, child: TrieNode) -> None:
        surprise, length, distribution = self._seen[parent]
        share = 1.0 if distribution is None else distribution.share(child.token)
        if share:
            self._add(child, surprise - math.log(share), length + 1)

    def _add(self, state: TrieNode, surprise: float, length: int) -> None:
        if state.logits is not None and state not in self._seen:
            heapq.heappush(self._likely, (surprise, next(self._order), state, length))


def _logits(state: TrieNode) -> torch.Tensor:
    assert state.logits is not None, "asked only where they are known"
    return state.logits.spread()


def _name(processor: LogitsProcessor) -> str:
    """What a processor is, if it is one of Transformers or `MinLengthProcessor`."""
    kind = type(processor)
    known = kind is MinLengthProcessor or kind.__module__ == "transformers.generation.logits_process"
    return kind.__name__ if known else ""


def _described(processor: LogitsProcessor) -> tuple[Any, ...]:
    """A processor with its settings; of one that is not known, what it is: it may hold anything."""
    name = _name(processor)
    if not name:
        return (type(processor).__module__, type(processor).__qualname__)
    settings = processor.settings if isinstance(processor, MinLengthProcessor) else vars(processor)
    return name, sorted((name, v.tolist() if isinstance(v, torch.Tensor) else v) for name, v in settings.items())
