"""LogitsKey: what a row has seen, as the path to its next logits in the trie of cached logits.

A step of the path is a number: a token, a token of an image, masked tokens inside a prompt, or something that is no
sequence of tokens, such as joined branches. This module alone knows which number is what. Files of `LogitsCache` hold
these numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_parallel.cache.images import is_image

_FIRST_BRANCH = -2
_FIRST_JOIN = -(1 << 56)


@dataclass(frozen=True, order=True)
class LogitsKey:
    """Key of the logits that follow what a row has seen."""

    steps: tuple[int, ...] = ()

    @classmethod
    def of_prompt(cls, tokens: np.ndarray, gaps: Mapping[int, int]) -> LogitsKey:
        """Return the key of a prompt, int64 `[length]`; `gaps` is the number of masked tokens before an index."""
        steps = [-count for count in gaps.values()]
        return cls(tuple(np.insert(tokens, list(gaps), steps).tolist()))

    def then(self, tokens: Iterable[int]) -> LogitsKey:
        """Return the key after further tokens."""
        return LogitsKey((*self.steps, *tokens))

    def branch(self, index: int) -> LogitsKey:
        """Return the key of a branch that does not see the branches before it."""
        return LogitsKey((*self.steps, _FIRST_BRANCH - index))

    def join(self, tokens: Sequence[int], branches: Sequence[LogitsKey], positions: str) -> LogitsKey:
        """Return the key after further tokens and the branches that follow these, joined at positions of a kind."""
        inside = [list(branch.steps[len(self.steps) :]) for branch in branches]
        digest = hashlib.sha256(repr((positions, inside)).encode()).digest()
        step = _FIRST_JOIN - int.from_bytes(digest[:7], "big")
        return LogitsKey((*self.steps, *tokens, step))


def state_step(digest: bytes) -> int:
    """Return the step to the state of a row that depends on all earlier inputs of a group, which were hashed."""
    return -1 - (int.from_bytes(digest[:8], "big") >> 1)


def is_token(step: int) -> bool:
    """Return whether a step is a token of text."""
    return step >= 0 and not is_image(step)


def is_in_text(step: int) -> bool:
    """Return whether a step is a token of text or of an image."""
    return step >= 0


def are_steps(steps: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return which numbers, int64 `[n]`, can be steps of a model's keys: bool `[n]`."""
    return (steps < vocabulary) | is_image(steps)
