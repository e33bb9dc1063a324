"""Randomness of rows: from a seed, the noise of a row's t-th token is a function of (seed, row, t) and of nothing else.

So a sample does not depend on what shares its batch, nor on how many of its tokens were replayed or skipped. The noise
of any token of the vocabulary can be had by itself: all rows draw at once, and on the host no noise is made for tokens
that cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hf_parallel.kernels import to_device

_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LONGEST_WAIT = 23.0
"""No exponential noise is above this: -log of half a step of a 32-bit number, rounded up."""
_SHORTEST_WAIT = 2.0**-33
"""And none is below this."""
_HOPELESS = _SHORTEST_WAIT / _LONGEST_WAIT / 2
"""A token that has this share of the best one's probability cannot win against it, whatever their noise."""


class RowRNG:
    """One row's randomness.

    Parameters
    ----------
    source : int or torch.Generator
        A seed, or the caller's generator on the device where tokens are drawn.
    """

    def __init__(self, source: int | torch.Generator) -> None:
        self._source, self._count = source, 0

    @property
    def is_own(self) -> bool:
        """Whether no other row draws from it."""
        return not isinstance(self._source, torch.Generator)

    def next(self) -> int | torch.Generator:
        """Of the row's next draw: a key, which says what its noise is, or the caller's generator."""
        if isinstance(self._source, torch.Generator):
            return self._source
        key = self.key(0)
        self._count += 1
        return key

    def key(self, ahead: int) -> int:
        """The key of the draw that is `ahead` draws behind the row's next one, which stays the next one."""
        assert not isinstance(self._source, torch.Generator), "the caller's generator has no keys"
        return mix(self._source, self._count + ahead)

    def skip(self) -> None:
        """Pass over the noise of a token that is not drawn."""
        self._count += 1

    def fork(self, count: int) -> list[RowRNG]:
        """Randomness of `count` rows that go on from here, each its own unless it is the caller's."""
        if isinstance(self._source, torch.Generator):
            return [self] * count
        here = mix(self._source, self._count)
        return [RowRNG(mix(here, number + 1)) for number in range(count)]


def make_rngs(seed: Any, num_rows: int) -> list[RowRNG] | None:
    """Randomness of `num_rows` rows, or None for PyTorch's global generator.

    Parameters
    ----------
    seed : int, torch.Generator, RowRNG, a list of them, or None
        One int gives every row noise of its own. A list gives one per row.

    Raises
    ------
    ValueError
        If a list has not one entry per row.
    """
    if seed is None:
        return None
    if isinstance(seed, torch.Generator | RowRNG):
        seed = [seed] * num_rows
    elif not isinstance(seed, list | tuple):
        seed = [mix(int(seed), row) for row in range(num_rows)]
    if len(seed) != num_rows:
        raise ValueError(f"seed must have one entry per row ({num_rows}), got {len(seed)}")
    return [_as_noise(one) for one in seed]


def _as_noise(seed: Any) -> RowRNG:
    if isinstance(seed, RowRNG):
        return seed
    return RowRNG(seed if isinstance(seed, torch.Generator) else int(seed))


def draw(shares: torch.Tensor, noise: Sequence[RowRNG]) -> torch.Tensor:
    """Draw a token for each row, as `torch.multinomial` does: the first of all to arrive, at rates that are its shares.

    Parameters
    ----------
    shares : float32 [rows, vocabulary]
        Probabilities.
    noise : sequence of RowRNG

    Returns
    -------
    int64 [rows]

    Raises
    ------
    RuntimeError
        If on the host a row has no probabilities, or some that are no numbers.
    """
    sources = [of.next() for of in noise]
    keys = [source for source in sources if isinstance(source, int)]
    if len(keys) == len(sources):
        return _first(shares, to_device(keys, shares.device))
    return torch.cat([_draw_one(row, source) for row, source in zip(shares[:, None], sources, strict=True)])


def _draw_one(shares: torch.Tensor, source: int | torch.Generator) -> torch.Tensor:
    if isinstance(source, int):
        return _first(shares, to_device([source], shares.device))
    return torch.multinomial(shares, 1, generator=source)[0]


def _first(shares: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The tokens `int64 [rows]` whose noise, divided by their `shares [rows, vocabulary]`, is the shortest."""
    if shares.device.type != "cpu":
        return (shares / exponential_noise(keys[:, None], _numbers(shares.shape[1], shares.device))).argmax(dim=-1)
    # In NumPy, row by row: waking a second thread for a row takes longer than the work.
    rates = shares.detach().numpy()
    best = rates.max(axis=-1)
    if not ((best > 0) & (best < np.inf)).all():
        raise RuntimeError(f"cannot draw: the highest probabilities of the rows are {best.tolist()}")
    first = []
    for row, least, key in zip(rates, best * np.float32(_HOPELESS), keys.tolist(), strict=True):
        hopeful = np.flatnonzero(row > least)
        first.append(draw_among(torch.from_numpy(hopeful), torch.from_numpy(row[hopeful]), key))
    return torch.tensor(first, dtype=torch.int64)


def draw_among(tokens: torch.Tensor, shares: torch.Tensor, key: int) -> int:
    """The token that is drawn by a key, `RowRNG.key`, if no others can be.

    Parameters
    ----------
    tokens : int64 [n]
    shares : float32 [n]
        Their probabilities, up to a factor.
    key : int
    """
    return int(tokens[(shares / exponential_noise(tokens.new_tensor(key), tokens)).argmax()])


def exponential_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exponential noise `float32`, a function of a draw's key and a token, both int64.

    splitmix64 of the two, its upper half taken for a number between 0 and 1.
    """
    bits = keys + tokens * _signed(_ODD[0])
    bits = (bits ^ _shifted(bits, 30)) * _signed(_ODD[1])
    bits = (bits ^ _shifted(bits, 27)) * _signed(_ODD[2])
    number = _shifted(bits ^ _shifted(bits, 31), 32).float().add_(0.5).mul_(2.0**-32)
    return number.neg_().log1p_().neg_().clamp_(max=_LONGEST_WAIT)


def _signed(bits: int) -> int:
    """A 64-bit number as the int64 with the same bits."""
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """int64 shifted to the right as if it had no sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


@lru_cache(maxsize=8)
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


def mix(seed: int, number: int) -> int:
    """A seed from another one and a number, without a pattern (splitmix64's finaliser)."""
    bits = (seed * _ODD[0] + (number + 1) * _ODD[1]) % 2**64
    bits = (bits ^ (bits >> 30)) * _ODD[1] % 2**64
    bits = (bits ^ (bits >> 27)) * _ODD[2] % 2**64
    return (bits ^ (bits >> 31)) % 2**63
