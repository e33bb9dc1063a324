"""Rollouts that outlive a step of the optimizer: an open engine samples them while its weights change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from hf_parallel.engine import Engine, QueueFullError, RequestHandle
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.generation.validation import check_int
from hf_parallel.training.example import as_ids
from hf_parallel.training.requests import rollout_settings, sampled_row


@dataclass(frozen=True)
class Rollout:
    """A finished rollout.

    Attributes
    ----------
    index : int
        Number of its prompt, counted from 0.
    prompt, tokens : list of int
    log_probs : list of float
        Log-probability of each token under the sampled distribution, with the weights of its version.
    versions : list of int
        Version of the weights from whose logits each token was sampled; see `Engine.updating_weights`.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]


@dataclass(frozen=True, eq=False)
class _Running:
    """A rollout that has begun, and the future of its end."""

    index: int
    prompt: list[int]
    handle: RequestHandle
    ended: Future[None]

    def first_version(self) -> int | None:
        """Return the version of its first token; None: it has no tokens."""
        versions = self.handle.token_versions
        return versions[0] if versions else None


class RolloutStream:
    """Rollouts of an open engine, for a loop that trains on finished rollouts while others run.

    Update the weights at most once after each `take`, in `Engine.updating_weights`. No token that `take` returns is
    then older than `max_lag` updates: `take` waits for rollouts that would become older. Nothing is dropped, so long
    rollouts are not underrepresented. With `max_lag=0`, `take` returns all rollouts, and the loop is synchronous.

    Parameters
    ----------
    engine : Engine
        Open.
    prompts : iterable of list of int
        Token ids of a prompt for each rollout, read when it begins.
    num_running : int
        Number of rollouts that run, or have ended and were not taken.
    max_lag : int
        Maximum number of updates between the version of a token and the one for which it is taken.
    seed : int
        Seed of the stream. Each rollout has a seed of its own, so tokens of one version do not depend on other
        rollouts.
    **settings
        Of `Engine.submit`, such as `max_new_tokens` and `temperature`. Each rollout is one sampled row.

    Raises
    ------
    ValueError
        For numbers that are too small, and for settings that do not sample, or sample several rows.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Iterable[Sequence[int]],
        *,
        num_running: int,
        max_lag: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        check_int("num_running", num_running, at_least=1)
        check_int("max_lag", max_lag, at_least=0)
        self.engine = engine
        self.num_running = num_running
        self.max_lag = max_lag
        self._prompts: Iterator[tuple[int, Sequence[int]]] = enumerate(prompts)
        self._seed = seed
        self._settings = rollout_settings(settings)
        self._begun: list[_Running] = []
        self._last_version: int | None = None  # at the last `take`

    def take(self, count: int) -> list[Rollout]:
        """Begin new rollouts, wait until enough have ended, and return these in the order of their prompts.

        It returns `count` rollouts, more if more of them would become older than `max_lag`, and fewer once the prompts
        are used up: none at the end. If a rollout has failed, its error is raised once, and the others can still be
        taken.

        Raises
        ------
        ValueError
            Unless `count` is between 1 and `num_running`.
        RuntimeError
            After several updates since the last `take`, in the body of an update, or if the engine is not open.
        QueueFullError
            If fewer than `num_running` requests can run or wait in the engine. No prompt is lost.
        """
        check_int("count", count, at_least=1)
        if count > self.num_running:
            raise ValueError(f"count must be at most num_running={self.num_running}, got {count}")
        self.engine.check_blocking()
        self._check_updates()
        self._begin()
        while True:
            running = [rollout for rollout in self._begun if not rollout.handle.done]
            has_enough = len(self._begun) - len(running) >= count
            if not running or (has_enough and not any(map(self._is_due, running))):
                break
            wait([rollout.ended for rollout in running], return_when=FIRST_COMPLETED)
        ended = [rollout for rollout in self._begun if rollout.handle.done]
        ended.sort(key=lambda rollout: (not self._is_due(rollout), rollout.handle.times.ended))
        num_due = sum(map(self._is_due, ended))
        taken = ended[: max(count, num_due)]
        for rollout in taken:
            if rollout.handle.error is not None:
                self._begun.remove(rollout)
                raise rollout.handle.error
        self._begun = [rollout for rollout in self._begun if rollout not in taken]
        return [_finished(rollout) for rollout in sorted(taken, key=lambda rollout: rollout.index)]

    def _check_updates(self) -> None:
        """Raise `RuntimeError` if rollouts may be older than `max_lag`."""
        version = self.engine.weights_version
        if self._last_version is not None and version > self._last_version + 1:
            raise RuntimeError(
                f"the weights were updated {version - self._last_version} times since the last take, so that rollouts "
                f"may be older than max_lag={self.max_lag}: make all steps in one updating_weights"
            )
        self._last_version = version

    def _begin(self) -> None:
        """Begin as many rollouts as there is place for."""
        for index, prompt in islice(self._prompts, self.num_running - len(self._begun)):
            ids = as_ids(prompt)
            try:
                handle = self.engine.submit(ids, seed=mix(self._seed, index), **self._settings)
            except QueueFullError:  # the next call tries again
                self._prompts = chain([(index, prompt)], self._prompts)
                raise
            self._begun.append(_Running(index, ids, handle, handle.ended()))

    def _is_due(self, rollout: _Running) -> bool:
        """Whether a rollout would be too old after the next update."""
        version = self.engine.weights_version
        first = rollout.first_version()
        return version - (version if first is None else first) >= self.max_lag


def _finished(rollout: _Running) -> Rollout:
    tokens, log_probs = sampled_row(rollout.handle.result())
    return Rollout(rollout.index, rollout.prompt, tokens, log_probs, rollout.handle.token_versions)
