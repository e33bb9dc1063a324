"""DenseRows: the rows of a batch under a stock attention implementation (`eager`, `sdpa`, ...).

Each row's keys and values are spelled out densely, re-rotated and padded: slow and correct, the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from hf_parallel.cache.batch import Segment, View, view_length
from hf_parallel.cache.pool import Pool
from hf_parallel.kernels import rotate_by


class DenseRows:
    """Views of the rows of a batch; empty under block attention."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.views: list[View] = []
        self.updated: set[int] = set()  # layers that the prepared pass has updated

    @property
    def length(self) -> int:
        """Number of tokens of the longest row."""
        return max(map(view_length, self.views), default=0)

    def next_segments(self, batch: int, length: int) -> list[Segment]:
        """Return the segments that append `length` tokens to each row of a batch, which starts without rows."""
        if not self.views:
            self.views = [[block] for block in self.pool.new_blocks(batch, length)]
        if len(self.views) != batch:
            raise ValueError(f"this cache has {len(self.views)} rows, the batch has {batch}")
        held = self.length
        if any((view_length(view), view[-1].base + view[-1].length) != (held, held) for view in self.views):
            raise ValueError(
                "rows of unequal lengths, or that see blocks at other positions than their own, need prepare(): pass "
                "its position_ids and the cache's attention_mask() to the model"
            )
        return [Segment(view, length) for view in self.views]

    @staticmethod
    def first_new_token(segments: Sequence[Segment]) -> int:
        """Return the index of the first new token in the longest row."""
        longest = max(segments, key=lambda segment: view_length(segment.view))
        return view_length(longest.view) - longest.num_tokens

    def states(self, layer_idx: int, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of each segment's view, left-padded: `[rows, kv_heads, longest, head_dim]`.

        Keys are rotated to the positions that the queries of the row expect.
        """
        layer = self.pool.arena.layers[layer_idx]
        spec = None if self.pool.rotary is None else self.pool.rotary.get(layer_idx)
        longest = max(view_length(segment.view) for segment in segments)
        dense: list[list[torch.Tensor]] = [[], []]
        for segment in segments:
            position, keys, values = 0, [], []
            shift = view_length(segment.view[:-1]) - segment.view[-1].base
            for block in segment.view:
                stored = layer.rows(block.tokens)
                delta = (position - block.base) - shift
                k, v = layer.keys[stored], layer.values[stored]
                if delta and spec is not None:
                    k, v = (k, rotate_by(v, delta, spec)) if spec.of_values else (rotate_by(k, delta, spec), v)
                keys.append(k)
                values.append(v)
                position += block.length
            for rows, parts in zip(dense, (keys, values), strict=True):
                rows.append(F.pad(torch.cat(parts, dim=1), (0, 0, longest - position, 0)))
        return torch.stack(dense[0]), torch.stack(dense[1])

    def select(self, chosen: Sequence[int]) -> None:
        """Keep the chosen rows; repeated rows get a copy of the block that they append to."""
        self._check_rows()
        views = [self.views[row] for row in chosen]
        seen = {block for view in views for block in view}
        for view in self.views:
            if view[-1] not in seen:
                self.pool.free(view[-1])
        for index, view in enumerate(views):
            if chosen[index] in chosen[:index]:
                own = view[-1]
                views[index] = [*view[:-1], self.pool.copy(own, own.free_slots)]
        self.views = views

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row; a positive number is the new length of all rows."""
        self._check_rows()
        lengths = list(map(view_length, self.views))
        for view, length in zip(self.views, lengths, strict=True):
            left = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
            for block in view:
                self.pool.truncate(block, min(block.length, max(left, 0)))
                left -= block.length
            if not view[-1].length:
                view[-1].base = view_length(view)

    def _check_rows(self) -> None:
        if self.pool.blocks and not self.views:
            raise ValueError("this cache has blocks but no rows; only rows under stock attention can be changed")


def attention_mask(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Return the mask `int64 [rows, longest]` of the dense rows."""
    lengths = torch.tensor([view_length(segment.view) for segment in segments], device=device)
    longest = int(lengths.max())
    return (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
