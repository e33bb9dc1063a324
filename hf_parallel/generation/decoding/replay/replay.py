"""Replayer: samples from cached logits before the model runs, and caches the logits that the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_parallel.cache.fingerprint import require_present
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.logits_key import LogitsKey, is_in_text
from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.cache.placement import execution_device
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.decoding.host import Host
from hf_parallel.generation.decoding.replay.distributions import HOST, DistributionCache, dense
from hf_parallel.generation.decoding.replay.policies import ReplayPolicy, uncertainty_at
from hf_parallel.generation.decoding.replay.prefetch import Prefetcher
from hf_parallel.generation.sampling.log_probs import LogProbs
from hf_parallel.generation.sampling.rng import Candidates
from hf_parallel.generation.sampling.sampler import Sampler
from hf_parallel.kernels import to_device
from hf_parallel.transcript.record import COMPUTED, DRAFTED, HOTSPOT, REPLAYED

_TOP_ONLY = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # the highest logits may be enough for these


@dataclass(eq=False)
class _CachedPath:
    """A cached continuation: its nodes, the token after each, and whether the policy samples it again."""

    nodes: list[TrieNode]
    tokens: list[int]
    draws: list[bool]
    position: int = 0

    @property
    def step(self) -> tuple[int | None, bool]:
        """The cached token at the current position, if any, and whether a token is sampled here."""
        has_token = self.position < len(self.tokens)
        return (self.tokens[self.position], self.draws[self.position]) if has_token else (None, True)


class Replayer:
    """Replays the rows of one call and caches their logits; see `ReplayConfig`.

    Tokens are sampled by `sampler` with the same processors, criteria and random noise as without a cache.
    """

    def __init__(
        self, call: GenerationCall, sampler: Sampler, cache: LogitsCache, policy: ReplayPolicy, prefetch: bool | None
    ) -> None:
        self.cache = cache
        self.policy = policy
        self.sampler = sampler
        self.stats = call.stats
        self._required = _required_logits(cache, call)
        require_present(call.model, "logits_cache")
        self.model_key = cache.root_key(call.fingerprint, call.host.cache_salt)
        head = call.model.get_output_embeddings()
        cache.check_vocabulary(self.model_key, getattr(head, "out_features", None) or vocabulary_size(call.model))
        self.prompts: list[TrieNode] = []  # nodes of the distinct prompts
        self.distributions = DistributionCache(cache, self.sampler)
        self.origins: dict[int, list[str]] = {}  # of each token, by row; see `Record`
        self._paths: dict[int, _CachedPath] = {}
        self._num_replayed: dict[int, int] = {}  # tokens by row
        self._tracked: set[int] = set()  # rows that have a cursor
        self._cached: set[int] = set()  # rows whose next token is sampled from cached logits
        if prefetch is None:
            prefetch = execution_device(call.model).type not in HOST
        self._prefetcher = Prefetcher(self.distributions, policy.looks_ahead) if prefetch else None

    @contextmanager
    def tracking(self, prompts: Sequence[LogitsKey] = ()) -> Iterator[None]:
        """Place the cursors of rows 0, 1, ... on their prompts; nodes under a cursor are not evicted."""
        with self.cache.cursors() as self.cursors:
            for row, prompt in enumerate(prompts):
                self.cursors.start(row, self.model_key, prompt.steps)
                self._tracked.add(row)
            lengths = self.sampler.table.lengths
            roots = {self.cursors.node(row): lengths[row] for row in self._tracked}
            self.prompts = list(roots)
            with nullcontext() if self._prefetcher is None else self._prefetcher.open(roots):
                yield

    def place(self, row: int, key: LogitsKey) -> None:
        """Place the cursor of a row on the node of what it has seen, its prompt included."""
        self.cursors.start(row, self.model_key, key.steps)
        self._tracked.add(row)

    def replayable(self, rows: Sequence[int]) -> list[int]:
        """Return the rows whose next logits are cached; with stateful processors or criteria all or none."""
        if self.sampler.is_stateful:
            return list(rows) if rows and self.lookup(rows) else []
        return [row for row in rows if self.lookup([row])]

    def skip_pass(self, rows: Sequence[int], steps: Sequence[int]) -> bool:
        """Advance cursors of rows by the steps from `RowGroup.advance`. Return whether the logits of all are cached."""
        for row, step in zip(rows, steps, strict=True):
            if row in self._tracked:
                self.cursors.advance(row, step)
            else:
                self.cursors.start(row, self.model_key, [step])
                self._tracked.add(row)
        return self.lookup(rows)

    def is_computed_by_other(self, row: int, host: Host) -> bool:
        """Return whether another call computes the next logits of a row now."""
        other = self.cursors.computed_by(row)
        return other is not None and other is not host and not (other.preempted or other.is_done)

    def start_prefetch(self) -> None:
        """Start the prefetcher, if there is one."""
        if self._prefetcher is not None:
            self._prefetcher.start()

    def sample(
        self, rows: Sequence[int], logits: torch.Tensor | None = None, drafted: bool = False
    ) -> tuple[list[int], list[bool], LogProbs | None]:
        """Append the next token of each row (ascending), and cache new logits. Return tokens, whether rows ended, and
        log-probabilities if the sampler returns them.

        `logits`, `[n, vocabulary]`, are those of the n rows without cached ones; `drafted`: they follow draft tokens.
        """
        computed = [row for row in rows if row not in self._cached]
        if computed:
            assert logits is not None, "the model has run for rows without cached logits"
            self._store(computed, logits)
        repeated: dict[int, int] = {}  # cached tokens by row
        distribution: Any = self._sparse(rows)
        if distribution is None:
            distribution = self._distribution(rows, logits)
            repeated = self._repeated(rows, distribution)
        token_of: dict[int, int] = {}
        has_ended: dict[int, bool] = {}
        indices = [index for index, row in enumerate(rows) if row not in repeated]
        if indices:
            drawing = [rows[index] for index in indices]
            if repeated:
                distribution = distribution[indices]
            tokens, ended = self.sampler.draw(drawing, distribution).read()
            token_of.update(zip(drawing, tokens, strict=True))
            has_ended.update(zip(drawing, ended, strict=True))
        if repeated:
            repeating = sorted(repeated)
            repeated_tokens = [repeated[row] for row in repeating]
            tokens, ended = self.sampler.append(repeating, repeated_tokens).read()
            token_of.update(zip(repeating, tokens, strict=True))
            has_ended.update(zip(repeating, ended, strict=True))
        tokens = [token_of[row] for row in rows]
        log_probs = None
        if self.sampler.returns_log_probs:
            log_probs = self._log_probs(rows, tokens, logits)
        for row, token in zip(rows, tokens, strict=True):
            self._advance(row, token, drafted)
        self._cached.difference_update(rows)
        return tokens, [has_ended[row] for row in rows], log_probs

    def lookup(self, rows: Sequence[int]) -> bool:
        """Whether the next logits of all rows are cached; if so, their next tokens are sampled from these."""
        is_cached = [self.cursors.lookup(row, *self._required) for row in rows]  # counts a hit or miss of each
        if not all(is_cached):
            return False
        self._cached.update(rows)
        return True

    def _repeated(self, rows: Sequence[int], distribution: torch.Tensor) -> dict[int, int]:
        """Return the cached tokens that the policy does not sample again, except those that the settings exclude."""
        if not self.policy.looks_ahead:
            return {}
        indices = []
        repeating = []
        tokens = []
        for index, row in enumerate(rows):
            if row in self._cached:
                token, draws = self._path(row).step
                if token is not None and not draws:
                    indices.append(index)
                    repeating.append(row)
                    tokens.append(token)
        if not tokens:
            return {}
        least = 0.0 if self.sampler.do_sample else -torch.inf
        are_possible = (distribution[indices, tokens] > least).tolist()
        repeated = {}
        for row, token, is_possible in zip(repeating, tokens, are_possible, strict=True):
            if is_possible:
                repeated[row] = token
        return repeated

    def _sparse(self, rows: Sequence[int]) -> list[Candidates] | None:
        """Return the cached distributions of rows, if no other is needed, and no dense one."""
        if self.policy.looks_ahead or not self._cached.issuperset(rows):
            return None
        return self.distributions.candidates(rows, [self.cursors.node(row) for row in rows])

    def _distribution(self, rows: Sequence[int], logits: torch.Tensor | None) -> torch.Tensor:
        """Return the distributions of rows; `logits` are those of the rows without cached ones."""
        nodes = [self.cursors.node(row) for row in rows]
        cached = [index for index, row in enumerate(rows) if row in self._cached]
        if len(cached) == len(rows):
            return self.distributions.compute(rows, nodes)
        assert logits is not None, "the model has run for rows without cached logits"
        if not cached:
            distribution = self.sampler.distribution(rows, logits)
            self.distributions.store_new(rows, nodes, distribution)
            return distribution
        computed = [index for index, row in enumerate(rows) if row not in self._cached]
        combined = logits.new_empty(len(rows), logits.shape[-1], dtype=torch.float32)
        cached_logits = torch.stack([dense(nodes[index]) for index in cached])
        combined[cached] = cached_logits.to(combined)
        combined[computed] = logits
        return self.sampler.distribution(rows, combined)

    def _log_probs(self, rows: Sequence[int], tokens: Sequence[int], logits: torch.Tensor | None) -> LogProbs:
        """Return the log-probabilities of the next tokens of rows; see `sample`."""
        nodes = [self.cursors.node(row) for row in rows]
        device = self.sampler.table.device
        sampling = torch.full((len(rows),), torch.nan, device=device)
        if logits is None and not self.sampler.top_log_probs:
            cached = [node.logits.log_prob(token) for node, token in zip(nodes, tokens, strict=True) if node.logits]
            return LogProbs(to_device(cached, device, torch.float32), sampling)
        if self._cached.intersection(rows):
            computed = iter(() if logits is None else logits.to(device))
            all_logits = []
            for row, node in zip(rows, nodes, strict=True):
                all_logits.append(dense(node).to(device) if row in self._cached else next(computed))
            logits = torch.stack(all_logits)
        assert logits is not None, "the model has run for rows without cached logits"
        log_probs = self.sampler.log_probs(logits, to_device(tokens, device))
        return LogProbs(log_probs.model, sampling, log_probs.top)

    def _store(self, rows: Sequence[int], logits: torch.Tensor) -> None:
        new = [i for i, row in enumerate(rows) if self.cursors.node(row).logits is None]
        if new:
            missing = logits if len(new) == len(rows) else logits[new]
            for i, row_logits in zip(new, missing.cpu(), strict=True):
                self.cursors.store(rows[i], row_logits)

    def _advance(self, row: int, token: int, drafted: bool) -> None:
        is_cached = row in self._cached
        path = self._paths.get(row)
        if self._prefetcher is not None and not is_cached:
            self._prefetcher.add(self.cursors.node(row), self.sampler.table.lengths[row] - 1)
        origin = DRAFTED if drafted else COMPUTED
        if is_cached:
            origin = REPLAYED
            if path is not None:
                earlier_token, draws = path.step
                if draws and earlier_token is not None:
                    origin = HOTSPOT
        self.origins.setdefault(row, []).append(origin)
        self.cursors.advance(row, token)
        if is_cached:
            self.stats.replayed_tokens += 1
            self._num_replayed[row] = self._num_replayed.get(row, 0) + 1
            if path is not None:
                path.position += 1

    def _path(self, row: int) -> _CachedPath:
        node = self.cursors.node(row)
        path = self._paths.get(row)
        if path is None or path.position >= len(path.nodes) or path.nodes[path.position] is not node:
            nodes, tokens, uncertainty = last_continuation(self.cache, node)
            draws = self.policy.draws(np.array(uncertainty), self._num_replayed.get(row, 0))
            path = _CachedPath(nodes, tokens, np.asarray(draws, dtype=bool).tolist())
            self._paths[row] = path
        return path


def last_continuation(cache: LogitsCache, node: TrieNode) -> tuple[list[TrieNode], list[int], list[float]]:
    """Follow the most recently used children as far as logits are cached; return nodes, tokens and uncertainties."""
    nodes = []
    tokens = []
    uncertainty = []
    child = cache.last_child(node)
    while child is not None:
        logits = node.logits  # read once, as another thread may evict the node
        if logits is not None:
            nodes.append(node)
            tokens.append(child.token)
            uncertainty.append(uncertainty_at(node, logits))
        elif is_in_text(child.token):
            break  # logits are missing; before the state of a row group there are none
        node = child
        child = cache.last_child(node)
    return nodes, tokens, uncertainty


def _required_logits(cache: LogitsCache, call: GenerationCall) -> tuple[int, float]:
    """Return the number of highest logits that the settings need, and the maximum `log_tail`, see `CachedLogits`."""
    config = call.generation_config
    processors = call.logits_processor
    if cache.top_k is None:
        return 0, np.inf
    returned = config.return_dict_in_generate and (config.output_logits or config.output_scores)
    if not returned and all(type(processor) in _TOP_ONLY for processor in processors):
        if not config.do_sample:
            return 1, np.inf
        # The first truncation decides what later ones receive; a temperature before it changes the probabilities.
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
