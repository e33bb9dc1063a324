"""Randomness of rows: from a seed, the noise of a row's t-th token is a function of (seed, row, t) and of nothing else.

So a sample does not depend on what shares its batch, nor on how many of its tokens were replayed or skipped.
"""

from __future__ import annotations

from typing import Any

import torch

_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class RowNoise:
    """One row's randomness.

    Parameters
    ----------
    generator : torch.Generator
        On the device where tokens are drawn.
    seed : int, optional
        Where the row's noise comes from. Default: from the generator as it is, which is the caller's.
    """

    def __init__(self, generator: torch.Generator, seed: int | None = None) -> None:
        self._generator, self._seed, self._count = generator, seed, 0

    def next(self) -> torch.Generator:
        """The generator of the row's next draw."""
        if self._seed is not None:
            self._generator.manual_seed(mix(self._seed, self._count))
        self._count += 1
        return self._generator

    def skip(self) -> None:
        """Pass over the noise of a token that is not drawn."""
        self._count += 1

    def fork(self, count: int) -> list[RowNoise]:
        """Randomness of `count` rows that go on from here, each its own unless it is the caller's."""
        if self._seed is None:
            return [self] * count
        here = mix(self._seed, self._count)
        return [RowNoise(self._generator, mix(here, number + 1)) for number in range(count)]


def make_noise(seed: Any, num_rows: int, device: torch.device) -> list[RowNoise] | None:
    """Randomness of `num_rows` rows, or None for PyTorch's global generator.

    Parameters
    ----------
    seed : int, torch.Generator, RowNoise, a list of them, or None
        One int gives every row noise of its own. A list gives one per row.

    Raises
    ------
    ValueError
        If a list has not one entry per row.
    """
    if seed is None:
        return None
    if isinstance(seed, torch.Generator | RowNoise):
        seed = [seed] * num_rows
    elif not isinstance(seed, list | tuple):
        seed = [mix(int(seed), row) for row in range(num_rows)]
    if len(seed) != num_rows:
        raise ValueError(f"seed must have one entry per row ({num_rows}), got {len(seed)}")
    return [_as_noise(one, device) for one in seed]


def _as_noise(seed: Any, device: torch.device) -> RowNoise:
    if isinstance(seed, RowNoise):
        return seed
    return RowNoise(seed) if isinstance(seed, torch.Generator) else RowNoise(torch.Generator(device), int(seed))


def mix(seed: int, number: int) -> int:
    """A seed from another one and a number, without a pattern (splitmix64's finaliser)."""
    bits = (seed * _ODD[0] + (number + 1) * _ODD[1]) % 2**64
    bits = (bits ^ (bits >> 30)) * _ODD[1] % 2**64
    bits = (bits ^ (bits >> 27)) * _ODD[2] % 2**64
    return (bits ^ (bits >> 31)) % 2**63
