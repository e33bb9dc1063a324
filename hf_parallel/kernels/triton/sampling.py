"""Triton backend of sampling; see `hf_parallel.kernels.sampling`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from hf_parallel.kernels.triton.launch import on_device
from hf_parallel.kernels.triton.sampling_kernels import choose_kernel, group_kernel, race_kernel, winner_kernel

_GROUP = 128  # as in the kernels
_GROUPS_PER_PROGRAM = 32
_WARPS = 8  # of a program that searches a row; two to four fit on a processor
_RACED = 1024  # tokens that it races among at once
# With more groups and without a limit of registers, ptxas spills to fit more programs.
_MOST_GROUPS = 2048
_REGISTERS = 128
_CHUNK = 4096  # tokens among which a program without filters races
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Lowest bits of a float32 that a score of each dtype does not have."""


def sample(
    scores: Tensor, settings: Tensor, keys: Tensor | None, noise: Tensor | None, filtered: bool, unfiltered: bool
) -> tuple[Tensor, Tensor]:
    """Return drawn tokens and their probabilities.

    `settings`, float32 `[rows or 1, 4]`, are the `Warpers.numbers` of each row or of all. `filtered` and `unfiltered`
    say whether there are rows with and without filters. Random numbers come from `keys`, or are given as `noise`.
    """
    if scores.dtype not in _SHIFTS:
        scores = scores.float()
    call = _SamplingLaunch(scores, settings, keys, noise)
    if unfiltered:
        call.race(False)
    if filtered:
        call.choose()
    return call.drawn, call.probs


def race(probs: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
    """Return the winners of races over probabilities."""
    call = _SamplingLaunch(probs, settings, keys, None)
    call.race(True)
    return call.drawn[0]


class _SamplingLaunch:
    """Arguments that the kernels share, and their outputs."""

    def __init__(self, scores: Tensor, settings: Tensor, keys: Tensor | None, noise: Tensor | None) -> None:
        is_seeded = keys is not None
        rows, self.vocabulary = scores.shape
        self.scores = scores if scores.stride(1) == 1 else scores.contiguous()
        self.drawn = torch.empty(2, rows, dtype=torch.int64, device=scores.device)
        self.probs = torch.empty(rows, dtype=torch.float32, device=scores.device)
        settings_stride = settings.stride(0) if len(settings) > 1 else 0
        self.settings = settings, settings_stride
        # The kernels do not read the source that they are not compiled for.
        if keys is None:
            keys = self.drawn
        if noise is None:
            noise = self.probs
        self.sources = keys, noise
        self.constants: dict[str, Any] = {
            "SEEDED": is_seeded,
            "LIBDEVICE": not knobs.runtime.interpret,
            "enable_fp_fusion": False,  # PyTorch rounds between product and difference
        }

    def race(self, is_probs: bool) -> None:
        """Race among all tokens of the rows without filters."""
        rows = len(self.scores)
        chunks = -(-self.vocabulary // _CHUNK)
        parts = self.probs.new_empty(rows, chunks, 4)
        winners = self._integers(rows, chunks)
        with on_device(self.scores.device):
            race_kernel[(rows, chunks)](
                self.scores, self.scores.stride(0), self.vocabulary, *self.settings, *self.sources, parts, winners,
                PROBS=is_probs, BLOCK=_CHUNK, num_warps=8, **self.constants,
            )  # fmt: skip
            winner_kernel[(rows,)](
                *self.settings, parts, winners, chunks, self.drawn, self.probs, BLOCK_C=_power(chunks), num_warps=1
            )

    def choose(self) -> None:
        """Race among the tokens that filters keep, of the rows with filters."""
        rows = len(self.scores)
        num_groups = -(-self.vocabulary // _GROUP)
        maxima = self.probs.new_empty(rows, num_groups)
        sums = self.probs.new_empty(rows, num_groups)
        num_programs = -(-num_groups // _GROUPS_PER_PROGRAM)
        inputs = self.scores, self.scores.stride(0), self.vocabulary, *self.settings
        registers = {"maxnreg": _REGISTERS} if num_groups > _MOST_GROUPS else {}
        with on_device(self.scores.device):
            group_kernel[(rows, num_programs)](
                *inputs, maxima, sums, num_groups, BLOCK_G=_GROUPS_PER_PROGRAM, num_warps=8, enable_fp_fusion=False
            )
            choose_kernel[(rows,)](
                *inputs, *self.sources, maxima, sums, self._integers(rows, num_groups), num_groups,
                self.drawn, self.probs, SHIFT=_SHIFTS[self.scores.dtype],
                BLOCK_G=_power(num_groups), BLOCK=32 * _WARPS, RACED=_RACED, num_warps=_WARPS,
                **registers, **self.constants,
            )  # fmt: skip

    def _integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.scores.device)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
