"""NgramDrafter: draft tokens by n-gram lookup in the logits trie, for speculative decoding.

After a row has left the cached continuations, it often repeats n-grams of other samples, of the prompt or of itself.
Each draft token is the one that followed there, or one that `DraftSampler` samples from the logits cached there with
the RNG of the row. The length of a draft follows from the measured acceptance rates.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import WeakKeyDictionary

import torch

from hf_parallel.cache.images import FIRST_ID
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.generation.replay.distributions import DistributionCache
from hf_parallel.generation.rng import draw_among
from hf_parallel.generation.sampling import Sampler
from hf_parallel.models.linear import pass_cost

MAX_DRAFT_TOKENS = 15
INITIAL_RATES = {8: 0.8, 5: 0.7, 3: 0.6, 2: 0.5, 1: 0.3}
"""Lengths of the n-grams that are looked up, longest first, and the initial acceptance rate of each."""
NGRAMS = tuple(INITIAL_RATES)
INITIAL_RATE_OF_TWO = 0.25  # initial acceptance rate of each of two different proposals
MAX_NODES = 4096  # maximum number of nodes indexed below a prompt, the most recently used ones
MIN_GAIN = 0.1  # minimum time that a draft must save, in passes of one token, as acceptance rates are estimates
STATE_COST = 1.0
"""Time that a row's draft costs where layers keep states, in passes of one token: each mixer is called once more, for
several tokens. In a Qwen3.5 of 12.6M parameters (float32, one core), a pass with drafts of 3 to 15 tokens took 2.2 to
3.1 times as long as a decode step of one row, and 4.3 to 5.4 times as long for drafts of 3 tokens of four rows."""
MIN_PROBABILITY = 0.05  # a draft ends before a token that is reached with a lower probability
MAX_SAMPLING_ROWS = 4  # passes of more rows do not sample draft tokens: each token takes about 0.1 ms
MAX_SETTINGS = 64  # settings per cache for which acceptance rates are kept, the most recently used ones
_DECAY = 0.95

CACHED, SAMPLED, AGREED, ONLY_CACHED = "cached", "sampled", "agreed", "only cached"
"""Sources of a proposed token: `CACHED` and `SAMPLED` if the cached and the sampled token differ, `AGREED` if they are
equal, `ONLY_CACHED` if none was sampled; `SAMPLED` also if none is cached."""

PredictToken = Callable[[int, TrieNode, int], int | None]
"""(row, node, ahead): the token that a row would sample `ahead` tokens from now, given the logits of a node."""


@dataclass
class AcceptanceRate:
    """Exponentially weighted fraction of proposals that were accepted."""

    proposed: float
    accepted: float

    @classmethod
    def initial(cls, ngram: int, source: str) -> AcceptanceRate:
        """Return the initial rate, which has the weight of four observations."""
        return cls(4.0, 4.0 * (INITIAL_RATE_OF_TWO if source in (CACHED, SAMPLED) else INITIAL_RATES[ngram]))

    def update(self, accepted: bool) -> None:
        """Count a verified draft token."""
        self.proposed = _DECAY * self.proposed + 1.0
        self.accepted = _DECAY * self.accepted + accepted

    @property
    def value(self) -> float:
        """Recent acceptance rate."""
        return self.accepted / self.proposed


@dataclass(frozen=True)
class _Proposal:
    """Proposed next tokens by source, after a match of `ngram` tokens. `source` is that of the draft token."""

    ngram: int
    tokens: dict[str, int]
    source: str

    @property
    def token(self) -> int:
        return self.tokens[self.source]


Rates = dict[tuple[int, str], AcceptanceRate]
_lock = threading.Lock()
acceptance_rates: WeakKeyDictionary[LogitsCache, dict[Hashable, Rates]] = WeakKeyDictionary()  # by settings


@dataclass(eq=False)
class NgramDrafter:
    """Proposes drafts of at most `max_tokens` tokens and estimates their acceptance rates.

    Calls over the same cache with the same sampling `settings` share the rates. `linear_backend`: see `pass_cost`.
    `keeps_states`: whether layers keep states, see `STATE_COST`.
    """

    cache: LogitsCache
    max_tokens: int = MAX_DRAFT_TOKENS
    settings: Hashable = None
    predict: PredictToken | None = None
    eos_token_ids: frozenset[int] = frozenset()
    linear_backend: str = "native"
    keeps_states: bool = False
    rates: Rates = field(init=False)  # by n-gram length and source
    ngrams: dict[tuple[int, ...], TrieNode] = field(init=False, default_factory=dict)  # latest node after each
    _proposals: dict[int, list[_Proposal]] = field(init=False, default_factory=dict)  # by row

    def __post_init__(self) -> None:
        with _lock:
            by_settings = acceptance_rates.setdefault(self.cache, {})
            keys = itertools.product(NGRAMS, (CACHED, SAMPLED, AGREED, ONLY_CACHED))
            new = {(ngram, source): AcceptanceRate.initial(ngram, source) for ngram, source in keys}
            self.rates = by_settings[self.settings] = by_settings.pop(self.settings, new)  # moves it to the end
            if len(by_settings) > MAX_SETTINGS:
                del by_settings[next(iter(by_settings))]

    def add_prompt(self, prompt: TrieNode) -> None:
        """Index a prompt and the continuations below it."""
        path = [prompt]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        known = [(node, _last_tokens(node)) for node in reversed(path)]
        below: list[tuple[TrieNode, tuple[int, ...]]] = []
        stack = known[-1:]
        while stack and len(below) < MAX_NODES:
            node, tokens = stack.pop()
            children = [
                (child, (*tokens, child.token)[-NGRAMS[0] :] if child.token >= 0 else ())
                for child in sorted(self.cache.children(node), key=attrgetter("last_used"))
            ]
            below += children
            stack += children
        for node, tokens in [*known, *sorted(below, key=lambda item: item[0].last_used)]:  # later ones replace earlier
            if _has_proposal(node, self.predict):
                self.add(node, tokens)

    def add(self, node: TrieNode, tokens: tuple[int, ...] | None = None) -> None:
        """Index the last tokens of a node, which are read from the trie unless given."""
        tokens = _last_tokens(node) if tokens is None else tokens
        for ngram in NGRAMS:
            if len(tokens) >= ngram:
                self.ngrams[tokens[-ngram:]] = node

    def draft(self, row: int, node: TrieNode, num_rows: int, capacity: int) -> list[int]:
        """Return at most `capacity` draft tokens of a row at `node`, if verifying them with `num_rows` saves time."""
        predict = self.predict if num_rows <= MAX_SAMPLING_ROWS else None
        self._proposals[row] = proposals = self._propose(row, node, min(self.max_tokens, capacity), predict)
        rates = [self._rate(proposal.ngram, proposal.source).value for proposal in proposals]
        length = _best_length(rates, num_rows, self.linear_backend, num_rows * STATE_COST if self.keeps_states else 0.0)
        return [proposal.token for proposal in proposals[:length]]

    def observe(self, row: int, node: TrieNode) -> None:
        """Update acceptance rates with the last token of a row."""
        proposals = self._proposals.pop(row, [])
        if proposals:
            for source, token in proposals[0].tokens.items():
                self._rate(proposals[0].ngram, source).update(token == node.token)
            if proposals[0].token == node.token:
                self._proposals[row] = proposals[1:]

    def _propose(self, row: int, node: TrieNode, capacity: int, predict: PredictToken | None) -> list[_Proposal]:
        """Return proposals for the next tokens of a row, as far as they are reached with sufficient probability."""
        tokens, probability = _last_tokens(node), 1.0
        proposals: list[_Proposal] = []
        match, ngram = self._look_up(tokens, predict)
        while match is not None and len(proposals) < capacity and probability >= MIN_PROBABILITY:
            children = {child.token: child for child in self.cache.children(match) if _is_text(child.token)}
            sampled = predict(row, match, len(proposals)) if predict is not None else None
            proposal = self._choose(ngram, children, sampled)
            if proposal is None:  # another thread has evicted the children
                break
            proposals.append(proposal)
            if proposal.token in self.eos_token_ids:
                break
            probability *= self._rate(ngram, proposal.source).value
            tokens = (*tokens, proposal.token)[-NGRAMS[0] :]
            match, ngram = children.get(proposal.token), ngram + 1
            other, other_ngram = self._look_up(tokens, predict)
            if match is None or not _has_proposal(match, predict) or other_ngram > ngram:
                match, ngram = other, other_ngram
        return proposals

    def _look_up(self, tokens: tuple[int, ...], predict: PredictToken | None) -> tuple[TrieNode | None, int]:
        """Return the node after the longest n-gram that ends `tokens`, and its length."""
        for ngram in NGRAMS:
            node = self.ngrams.get(tokens[-ngram:]) if len(tokens) >= ngram else None
            if node is not None and _has_proposal(node, predict):
                return node, ngram
        return None, 0

    def _choose(self, ngram: int, children: dict[int, TrieNode], sampled: int | None) -> _Proposal | None:
        """Choose between the most recently used child and the sampled token, by acceptance rate."""
        cached = max(children, key=lambda token: children[token].last_used, default=None)
        if cached is None:
            tokens = {} if sampled is None else {SAMPLED: sampled}
        elif sampled is None:
            tokens = {ONLY_CACHED: cached}
        else:
            tokens = {AGREED: cached} if cached == sampled else {CACHED: cached, SAMPLED: sampled}
        if not tokens:
            return None
        return _Proposal(ngram, tokens, max(tokens, key=lambda source: self._rate(ngram, source).value))

    def _rate(self, ngram: int, source: str) -> AcceptanceRate:
        return self.rates[next(known for known in NGRAMS if known <= ngram), source]


@dataclass(eq=False)
class DraftSampler:
    """Samples draft tokens from cached logits with the RNG of the row, which is not advanced; see `PredictToken`.

    Of the logits processors only the temperature is applied, unless the node has a cached distribution.
    """

    sampler: Sampler
    distributions: DistributionCache
    temperature: float
    top_k: int = 8  # other tokens are rarely sampled where drafts are accepted
    _top: dict[TrieNode, tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=dict)

    def __call__(self, row: int, node: TrieNode, ahead: int) -> int | None:
        assert self.sampler.rngs is not None, "rows have RNGs of their own"
        top = self._top.get(node) or self._load(node)
        return None if top is None else draw_among(*top, self.sampler.rngs[row].key(ahead))

    def _load(self, node: TrieNode) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the most probable tokens after a node, int64, and their probabilities, float32, up to a factor."""
        cached, logits = self.distributions.find_any_length(node), node.logits
        if cached is not None:
            probs, indices = cached.probs.topk(min(self.top_k, len(cached.probs)))
            ids = cached.ids[indices].long()
        elif logits is not None and len(logits.values):
            values, ids = logits.values.topk(min(self.top_k, len(logits.values)))
            probs = ((values.float() - values[0].float()) / self.temperature).exp()
            ids = ids if logits.ids is None else logits.ids[ids].long()
        else:
            return None
        self._top[node] = ids, probs
        return ids, probs


def _is_text(token: int) -> bool:
    return 0 <= token < FIRST_ID  # neither a state of Hogwild! nor a token of an image


def _has_proposal(node: TrieNode, predict: PredictToken | None) -> bool:
    return any(map(_is_text, node.children)) or (predict is not None and node.logits is not None)


def _best_length(rates: Sequence[float], num_rows: int, linear_backend: str, state_cost: float) -> int:
    """Return the draft length that saves most time: expected passes saved, less the cost of verification."""
    saved, probability, best, length = 0.0, 1.0, MIN_GAIN + state_cost, 0
    cost_without = pass_cost(num_rows, linear_backend)
    for tokens, rate in enumerate(rates, start=1):
        probability *= rate
        saved += probability * cost_without
        gain = saved - pass_cost(num_rows * (1 + tokens), linear_backend) + cost_without
        if gain > best:
            best, length = gain, tokens
    return length


def _last_tokens(node: TrieNode) -> tuple[int, ...]:
    tokens: list[int] = []
    current: TrieNode | None = node
    while current is not None and current.token >= 0 and len(tokens) < NGRAMS[0]:
        tokens.append(current.token)
        current = current.parent
    return tuple(reversed(tokens))
