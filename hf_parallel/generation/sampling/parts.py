"""Part: consecutive rows of a tensor that several calls share, which is sliced only where a call reads its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALL = slice(None)


class Part(NamedTuple):
    """Rows of a tensor `[rows of all calls, ...]`."""

    whole: torch.Tensor
    rows: slice = ALL

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.whole) if self.rows is ALL else self.rows.stop - self.rows.start

    @property
    def tensor(self) -> torch.Tensor:
        """The rows."""
        return self.whole if self.rows is ALL else self.whole[self.rows]


def join(parts: Sequence[Part]) -> torch.Tensor:
    """Return the rows of all parts: without a copy if they are successive parts of one tensor."""
    whole, first = parts[0]
    if len(parts) == 1:
        return parts[0].tensor
    if first is not ALL:
        end = first.start
        for other, rows in parts:
            if other is not whole or rows.start != end:
                break
            end = rows.stop
        else:
            return whole if end - first.start == len(whole) else whole[first.start : end]
    return torch.cat([part.tensor for part in parts])
