"""Random numbers of rows: the noise of a row's t-th token is a function of (seed, row, t) alone.

A sample therefore depends neither on the rest of its batch nor on how many of its tokens were replayed. Tokens are
sampled by an exponential race, which is equivalent to the Gumbel-max trick: token v wins if E_v / p_v is the smallest,
with independent E_v ~ Exp(1). The noise is counter-based, so the CPU computes it only for tokens that can win, in C if
the compiled kernels are available.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from hf_parallel.kernels import native, to_device
from hf_parallel.kernels.sampling import can_race, race

_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SPLITMIX_INT64 = tuple(bits - 2**64 for bits in _SPLITMIX)
_MAX_NOISE = 23.0  # -log of half a step of a 32-bit number, rounded up
_MIN_NOISE = 2.0**-33
_NEGLIGIBLE = _MIN_NOISE / _MAX_NOISE / 2  # a token with this fraction of the highest probability cannot win the race


Candidates: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Tokens `int [n]` and their probabilities `float32 [n]`. Others have the probability 0."""


class CannotDrawError(RuntimeError):
    """Raised before any generator has advanced."""


class RowRNG:
    """Random number generator of one row."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.count = 0

    def skip(self) -> None:
        """Skip the random noise of one token."""
        self.count += 1

    def fork(self, count: int) -> list[RowRNG]:
        """Return generators for `count` continuations of the row."""
        seed = mix(self.seed, self.count)
        return [RowRNG(mix(seed, number + 1)) for number in range(count)]


Seed: TypeAlias = "int | Sequence[int | RowRNG] | None"
"""`seed` of `ParallelConfig`, or RNGs of other rows that rows continue."""


def make_rngs(seed: Seed, num_rows: int) -> list[RowRNG] | None:
    """Return one generator per row, or None for PyTorch's global generator."""
    if seed is None:
        return None
    if not isinstance(seed, Sequence):
        seed = [mix(int(seed), row) for row in range(num_rows)]
    if len(seed) != num_rows:
        raise ValueError(f"seed must have one entry per row ({num_rows}), got {len(seed)}")
    return [of_row if isinstance(of_row, RowRNG) else RowRNG(int(of_row)) for of_row in seed]


def next_keys(rngs: Sequence[RowRNG], device: torch.device) -> torch.Tensor:
    """Return the RNG keys `int64 [rows]` of the next tokens of rows, and advance their RNGs."""
    seeds = []
    numbers = []
    for rng in rngs:
        seeds.append(rng.seed % 2**64)
        rng.skip()
        numbers.append(rng.count)
    increment = np.uint64(_SPLITMIX[0])
    factor = np.uint64(_SPLITMIX[1])
    bits = np.array(seeds, np.uint64) * increment + np.array(numbers, np.uint64) * factor  # as `mix`
    keys = _finalize(bits) & np.uint64(2**63 - 1)
    return to_device(keys.astype(np.int64), device)


def take_back(rngs: Sequence[RowRNG]) -> None:
    """Undo the last `next_keys` of rows that cannot be drawn."""
    for rng in rngs:
        rng.count -= 1


def draw(probs: torch.Tensor, rngs: Sequence[RowRNG]) -> torch.Tensor:
    """Sample one token for each row, `int64 [rows]`, from `probs`, `float32 [rows, vocabulary]`.

    Raises
    ------
    CannotDrawError
        If the highest probability of a row is zero or not finite. Only on the CPU, without the Triton backend.
    """
    keys = next_keys(rngs, probs.device)
    if probs.device.type != "cpu" or can_race(probs.device):
        return _race(probs, keys)
    tokens = _race_on_cpu(probs.detach(), keys)
    if tokens is None:
        take_back(rngs)
        best = probs.amax(dim=-1)
        raise CannotDrawError(f"cannot draw: the highest probabilities of the rows are {best.tolist()}")
    return tokens


def draw_among_each(candidates: Sequence[Candidates], rngs: Sequence[RowRNG]) -> torch.Tensor:
    """Sample one token for each row, `int64 [rows]`, on the CPU, with the same result as `draw`."""
    winners = []
    for (ids, probs), key in zip(candidates, next_keys(rngs, torch.device("cpu")).split(1), strict=True):
        winner = _race_on_cpu(probs[None], key, ids.long())
        assert winner is not None, "candidates have positive probabilities"
        winners.append(winner)
    return torch.cat(winners)


def _race(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the winners `int64 [rows]` of the races over `probs [rows, vocabulary]` on a GPU, or by Triton."""
    if can_race(probs.device):
        return race(probs, keys)
    every = torch.arange(probs.shape[1], device=probs.device)
    return (probs / exponential_noise(keys[:, None], every)).argmax(dim=-1)


def _race_on_cpu(probs: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return the winners over `probs [rows, n]`; None if the highest probability of a row is zero or not finite.

    `ids` are the tokens int64 `[n]`, by default 0, 1, ....
    """
    if native.is_available():
        return native.race(probs.contiguous(), keys, None if ids is None else ids.contiguous())
    # In NumPy: waking a second thread takes longer than the work on the few tokens that can win.
    rates = probs.numpy()
    best = rates.max(axis=-1, keepdims=True)
    if not ((best > 0) & (best < np.inf)).all():
        return None
    can_win = rates > best * np.float32(_NEGLIGIBLE)
    tokens = np.arange(rates.shape[1]) if ids is None else ids.numpy()
    winners = []
    for row_can_win, row_rates, key in zip(can_win, rates, keys.tolist(), strict=True):
        winners.append(_winner(tokens[row_can_win], row_rates[row_can_win], key))
    return torch.tensor(winners, dtype=torch.int64)


def _winner(tokens: np.ndarray, probs: np.ndarray, key: int) -> int:
    """Return the winner of the race of a row."""
    return int(tokens[_times(tokens, probs, np.int64(key)).argmax()])


def _times(tokens: np.ndarray, probs: np.ndarray, keys: np.ndarray | np.int64) -> np.ndarray:
    """Return the inverse times of tokens; `exponential_noise` in NumPy, which is faster for a few tokens."""
    bits = keys.astype(np.uint64) + tokens.astype(np.uint64) * np.uint64(_SPLITMIX[0])
    upper_bits = _finalize(bits) >> np.uint64(32)
    uniform = upper_bits.astype(np.float32)
    uniform = (uniform + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        noise = np.minimum(-np.log1p(-uniform), np.float32(_MAX_NOISE))
    return probs / noise


def _finalize(bits: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64 of `uint64` numbers."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_SPLITMIX[1])
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SPLITMIX[2])
    return bits ^ (bits >> np.uint64(31))


def exponential_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return Exp(1) noise `float32`, a function of RNG key and token (both int64, broadcast).

    The upper 32 bits of splitmix64 of both, as a uniform number between 0 and 1, give the noise by inversion.
    """
    bits = keys + tokens * _SPLITMIX_INT64[0]
    bits = (bits ^ _shift_right(bits, 30)) * _SPLITMIX_INT64[1]
    bits = (bits ^ _shift_right(bits, 27)) * _SPLITMIX_INT64[2]
    bits = bits ^ _shift_right(bits, 31)
    uniform = _shift_right(bits, 32).float().add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().clamp_(max=_MAX_NOISE)


def _shift_right(bits: torch.Tensor, places: int) -> torch.Tensor:
    # The shift of int64 is arithmetic.
    return (bits >> places) & ((1 << (64 - places)) - 1)


def mix(seed: int, number: int) -> int:
    """Return a seed derived from a seed and a number (finalizer of splitmix64)."""
    bits = (seed * _SPLITMIX[0] + (number + 1) * _SPLITMIX[1]) % 2**64
    bits = (bits ^ (bits >> 30)) * _SPLITMIX[1] % 2**64
    bits = (bits ^ (bits >> 27)) * _SPLITMIX[2] % 2**64
    return (bits ^ (bits >> 31)) % 2**63
