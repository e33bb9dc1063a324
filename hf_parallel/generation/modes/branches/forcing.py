"""Forced formats: a mode forbids the tokens that would break the text of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor


class FormatProcessor(LogitsProcessor):
    """Forbids the tokens that a run of a mode does not allow in its answers; see `BranchRun.allowed`."""

    keeps_rows = False
    run: Any
    """The `BranchRun`."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[rows, vocabulary]` of sampled rows or of all, minus infinity for forbidden tokens."""
        roots = self.run.roots
        rows: Sequence[int] = self.run.loop.sampler.processors.rows
        if len(scores) != len(rows):
            rows = range(len(scores))
        allowed = []
        for row in rows:
            is_free = row >= len(roots) or roots[row].thinking is not None
            allowed.append(None if is_free else self.run.allowed(roots[row]))
        return force(scores, allowed)


def force(scores: torch.Tensor, allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Forbid tokens in scores `[rows, vocabulary]` that the row's mask, bool `[vocabulary]`, lacks; None forbids none.

    If all allowed tokens of a row are at minus infinity, they get equal scores.
    """
    forced = scores.clone()
    for row, mask in enumerate(allowed):
        if mask is not None:
            mask = mask.to(scores.device)
            masked = scores[row].masked_fill(~mask, -torch.inf)
            if torch.isneginf(masked).all():
                masked = torch.zeros_like(masked).masked_fill(~mask, -torch.inf)
            forced[row] = masked
    return forced
