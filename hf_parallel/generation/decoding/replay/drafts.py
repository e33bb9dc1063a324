"""NgramDrafter: draft tokens by n-gram lookup in the logits trie, for speculative decoding.

After a row has left the cached continuations, it often repeats n-grams of other samples, of the prompt or of itself.
A draft consists of the tokens that followed there most recently. Its length follows from the measured acceptance rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import WeakKeyDictionary

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.logits_key import is_in_text, is_token
from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.models.cpu.linear import pass_cost

MAX_DRAFT_TOKENS = 15
INITIAL_RATES = {8: 0.8, 5: 0.7, 3: 0.6, 2: 0.5, 1: 0.3}
"""Lengths of the n-grams that are looked up, longest first, and the initial acceptance rate of each."""
NGRAMS = tuple(INITIAL_RATES)
RATE_STEP = 0.05
"""Weight of a verified token in the acceptance rate of its n-gram length, an exponential moving average."""
MAX_NODES = 4096  # maximum number of nodes indexed below a prompt, the most recently used ones
MIN_GAIN = 0.1  # minimum time that a draft must save, in passes of one token, as acceptance rates are estimates
MIN_PROBABILITY = 0.05  # a draft ends before a token that is reached with a lower probability

_rates: WeakKeyDictionary[LogitsCache, dict[int, float]] = WeakKeyDictionary()


@dataclass(eq=False)
class NgramDrafter:
    """Proposes drafts of at most `max_tokens` tokens and estimates their acceptance rates.

    Calls over the same cache share the rates. `linear_backend`: see `pass_cost`.
    """

    cache: LogitsCache
    max_tokens: int = MAX_DRAFT_TOKENS
    eos_token_ids: frozenset[int] = frozenset()
    linear_backend: str = "native"
    rates: dict[int, float] = field(init=False)  # acceptance rates by n-gram length
    ngrams: dict[tuple[int, ...], TrieNode] = field(init=False, default_factory=dict)  # latest node after each
    _proposals: dict[int, list[tuple[int, int]]] = field(init=False, default_factory=dict)  # (n-gram, token) by row

    def __post_init__(self) -> None:
        self.rates = _rates.setdefault(self.cache, dict(INITIAL_RATES))

    def add_prompt(self, prompt: TrieNode) -> None:
        """Index a prompt and the continuations below it."""
        path = [prompt]
        parent = prompt.parent
        while parent is not None:
            path.append(parent)
            parent = parent.parent
        below: list[TrieNode] = []
        stack = [prompt]
        while stack and len(below) < MAX_NODES:
            children = sorted(self.cache.children(stack.pop()), key=attrgetter("last_used"))
            below += children
            stack += children
        for node in [*reversed(path), *sorted(below, key=attrgetter("last_used"))]:  # later ones replace earlier ones
            if self._continuation(node) is not None:
                self.add(node)

    def add(self, node: TrieNode) -> None:
        """Index the last tokens of a node."""
        tokens = _last_tokens(node)
        for ngram in NGRAMS:
            if len(tokens) >= ngram:
                self.ngrams[tokens[-ngram:]] = node

    def draft(self, row: int, node: TrieNode, num_rows: int, capacity: int) -> list[int]:
        """Return at most `capacity` draft tokens of a row at `node`, if verifying them with `num_rows` saves time."""
        proposals = self._propose(node, min(self.max_tokens, capacity))
        self._proposals[row] = proposals
        rates = [self.rates[ngram] for ngram, _ in proposals]
        length = _best_length(rates, num_rows, self.linear_backend)
        return [token for _, token in proposals[:length]]

    def observe(self, row: int, node: TrieNode) -> None:
        """Update acceptance rates with the last token of a row."""
        proposals = self._proposals.pop(row, [])
        if proposals:
            ngram, token = proposals[0]
            is_accepted = token == node.token
            self.rates[ngram] += RATE_STEP * (is_accepted - self.rates[ngram])
            if is_accepted:
                self._proposals[row] = proposals[1:]

    def _propose(self, node: TrieNode, capacity: int) -> list[tuple[int, int]]:
        """Return n-grams and the tokens after them, as far as these are reached with sufficient probability."""
        tokens = _last_tokens(node)
        probability = 1.0
        proposals: list[tuple[int, int]] = []
        child, length = self._look_up(tokens)
        while child is not None and len(proposals) < capacity and probability >= MIN_PROBABILITY:
            ngram = next(size for size in NGRAMS if size <= length)
            proposals.append((ngram, child.token))
            if child.token in self.eos_token_ids:
                break
            probability *= self.rates[ngram]
            tokens = (*tokens, child.token)[-NGRAMS[0] :]
            child = self._continuation(child)
            length = length + 1
            other, other_length = self._look_up(tokens)
            if child is None or other_length > length:
                child = other
                length = other_length
        return proposals

    def _look_up(self, tokens: tuple[int, ...]) -> tuple[TrieNode | None, int]:
        """Return the continuation of the longest n-gram that ends `tokens`, and the length of the n-gram."""
        for ngram in NGRAMS:
            node = self.ngrams.get(tokens[-ngram:]) if len(tokens) >= ngram else None
            child = None if node is None else self._continuation(node)
            if child is not None:
                return child, ngram
        return None, 0

    def _continuation(self, node: TrieNode) -> TrieNode | None:
        """Return the most recently used child that is neither a state of Hogwild! nor a token of an image."""
        children = [child for child in self.cache.children(node) if is_token(child.token)]
        return max(children, key=attrgetter("last_used"), default=None)


def _best_length(rates: Sequence[float], num_rows: int, linear_backend: str) -> int:
    """Return the draft length that saves most time: expected passes saved, less the cost of verification."""
    saved = 0.0
    probability = 1.0
    best = MIN_GAIN
    length = 0
    cost_without = pass_cost(num_rows, linear_backend)
    for tokens, rate in enumerate(rates, start=1):
        probability *= rate
        saved += probability * cost_without
        gain = saved - pass_cost(num_rows * (1 + tokens), linear_backend) + cost_without
        if gain > best:
            best = gain
            length = tokens
    return length


def _last_tokens(node: TrieNode) -> tuple[int, ...]:
    tokens: list[int] = []
    current: TrieNode | None = node
    while current is not None and is_in_text(current.token) and len(tokens) < NGRAMS[0]:
        tokens.append(current.token)
        current = current.parent
    return tuple(reversed(tokens))
