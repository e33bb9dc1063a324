"""Sampling from scores as one operation: temperature, top-k, top-p and min-p filters, softmax and the draw.

It keeps the tokens that the warpers of Transformers keep, without sorting the vocabulary. The Triton backend computes
it, and on a CPU the C kernels do for rows with a top-k; without them, callers use the operations one by one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_parallel.kernels import native
from hf_parallel.kernels.dispatch import select_backend
from hf_parallel.kernels.transfer import to_device

MANY_ROWS = 32  # from which the processors of a GPU are busy although one program searches a row
_SMALL_TOP_K = 128  # up to which a program reads a small part of its row more than once


@dataclass(frozen=True)
class Warpers:
    """Settings of the warpers of a row, in the order in which they are applied; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_filter(self) -> bool:
        """Whether tokens may be removed."""
        return bool(self.top_k > 0 or self.top_p < 1 or np.float32(self.min_p) > 0)

    @property
    def is_quick(self) -> bool:
        """Whether no program reads a whole row more than once, unless many scores are equal."""
        return not self.is_filter or 0 < self.top_k <= _SMALL_TOP_K

    def numbers(self, vocabulary: int, is_inverted: bool = True) -> tuple[float, float, float, float]:
        """Return what the kernels read. PyTorch divides by a number on CUDA by multiplying with its inverse."""
        divisor = float(np.float32(1) / np.float32(self.temperature)) if is_inverted else self.temperature
        return divisor, min(self.top_k, vocabulary), 1 - self.top_p, self.min_p


def can_race(device: torch.device) -> bool:
    """Whether `race` is available on a device, and with it `sample`."""
    return select_backend(device) == "triton"


def can_sample(device: torch.device, warpers: Iterable[Warpers], rows: int, is_seeded: bool) -> bool:
    """Whether `sample` is available on a device, and not slower for these rows than PyTorch's operations.

    `is_seeded`: whether rows have keys.
    """
    if can_race(device):
        return rows >= MANY_ROWS or all(of_row.is_quick for of_row in warpers)
    if device.type != "cpu" or not native.is_available():
        return False
    return (is_seeded or _has_own_noise()) and all(0 < of_row.top_k <= _SMALL_TOP_K for of_row in warpers)


def sample(
    scores: Tensor, warpers: Warpers | Sequence[Warpers], keys: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sample one token of each row.

    Parameters
    ----------
    scores : [rows, vocabulary]
        Scores of any float dtype.
    warpers : Warpers or sequence of Warpers
        Settings of all rows, or of each.
    keys : int64 [rows], optional
        RNG keys; None: PyTorch's global generator, which returns the same tokens as `torch.multinomial`.

    Returns
    -------
    tokens : int64 [rows]
        The tokens.
    marks : int64 [rows], optional
        2 for each row whose probabilities are not finite (its token is 0), else 0. None: all are finite.
    probs : float32 [rows]
        Probabilities of the tokens.
    """
    vocabulary = scores.shape[1]
    is_native = not can_race(scores.device)
    of_rows = [warpers] if isinstance(warpers, Warpers) else warpers
    settings = settings_of(of_rows, vocabulary, scores.device, not is_native)
    if is_native:
        return native.sample(scores.float().contiguous(), settings, keys)
    noise = None
    if keys is None:
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device).exponential_()
    has_filters = any(of_row.is_filter for of_row in of_rows)
    has_unfiltered = not all(of_row.is_filter for of_row in of_rows)
    drawn, probs = _backend().sample(scores, settings, keys, noise, has_filters, has_unfiltered)
    return drawn[0], drawn[1], probs


def settings_of(warpers: Sequence[Warpers], vocabulary: int, device: torch.device, is_inverted: bool) -> Tensor:
    """Return the settings of each row, or once if all rows share them: `Warpers.numbers`, float32 `[rows or 1, 4]`."""
    if warpers.count(warpers[0]) == len(warpers):
        return _uniform(warpers[0], vocabulary, device, is_inverted)
    numbers: list[float] = []
    for of_row in warpers:
        numbers += of_row.numbers(vocabulary, is_inverted)
    return to_device(numbers, device, torch.float32).view(-1, 4)


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax `float32 [rows, vocabulary]` of scores; on a CPU in the bits of `sample`."""
    scores = scores.float()
    if scores.device.type == "cpu" and native.is_available() and not scores.requires_grad:
        return native.softmax(scores.contiguous())
    return scores.softmax(dim=-1)


def race(probs: Tensor, keys: Tensor) -> Tensor:
    """Return the winners `int64 [rows]` of the races over `probs`, `float32 [rows, vocabulary]`."""
    return _backend().race(probs, _uniform(Warpers(), 1, probs.device, True), keys)  # type: ignore[no-any-return]


def multinomial(probs: Tensor) -> Tensor:
    """Return the tokens `int64 [rows]` that `torch.multinomial` draws from `probs` with PyTorch's global generator."""
    is_usual = probs.device.type == "cpu" and probs.dtype == torch.float32 and probs.is_contiguous()
    if is_usual and probs.numel() and not probs.requires_grad and _has_own_noise():
        tokens = native.multinomial(probs)
        if tokens is not None:  # else PyTorch raises
            return tokens
    return torch.multinomial(probs, num_samples=1).squeeze(1)


@lru_cache
def _has_own_noise() -> bool:
    """Whether PyTorch draws on the CPU as `native.multinomial` does: it may use MKL's generator."""
    if not native.is_available() or not native.has_known_generator():
        return False
    probs = torch.linspace(0.1, 1, 3003, dtype=torch.float32).view(3, -1)
    native_generator = torch.Generator().manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens = native.multinomial(probs, native_generator)
    expected = torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)
    if tokens is None or not tokens.equal(expected):
        return False
    return native_generator.get_state().equal(generator.get_state())


def _backend() -> Any:
    return importlib.import_module(".triton.sampling", __package__)


@lru_cache(maxsize=64)
def _uniform(warpers: Warpers, vocabulary: int, device: torch.device, is_inverted: bool) -> Tensor:
    """Settings of all rows, copied once."""
    with torch.inference_mode(False):
        return torch.tensor([warpers.numbers(vocabulary, is_inverted)], dtype=torch.float32, device=device)
