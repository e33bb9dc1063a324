"""`BlockCache`: the `transformers.Cache` over blocks.

Under block attention, `update` stores the packed new tokens and returns them; attention reads the blocks in place.
Under a stock attention implementation (`eager`, `sdpa`, ...), `update` returns each row's keys and values densely,
re-rotated and padded: slow and correct, the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache

from hf_parallel.cache.blocks import BlockPool
from hf_parallel.cache.layout import ForwardPass, Segment, View, view_length
from hf_parallel.kernels import RotarySpec, rotate_by


class BlockCache(BlockPool, Cache):
    """Keys and values in blocks, each stored once, however many rows see it.

    Parameters
    ----------
    rotary : mapping of int to RotarySpec or None, optional
        Rotary embedding by layer index (None: the layer has none). Needed only if blocks are moved or seen at
        positions other than those that they were written for.
    device : torch.device, optional
        Device of position ids; the storage is on the device of the model's keys.

    Attributes
    ----------
    rows : list of View
        Views of the batch under stock attention; empty under block attention.
    block_attention : bool
        Whether the model runs under block attention.
    """

    def __init__(
        self, rotary: Mapping[int, RotarySpec | None] | None = None, device: torch.device | str | None = None
    ) -> None:
        Cache.__init__(self, layers=[])
        BlockPool.__init__(self, rotary, device)
        self.rows: list[View] = []
        self.block_attention = False
        self._updated: set[int] = set()  # layers that the prepared pass has updated, under stock attention

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values.

        Parameters
        ----------
        key_states, value_states : [1, kv_heads, T, head_dim], or [rows, kv_heads, n, head_dim] under stock attention
            New tokens in packed order, rotated to the pass's position ids.

        Returns
        -------
        (keys, values)
            Under block attention the arguments. Under stock attention `[rows, kv_heads, L, head_dim]`: each row's
            whole view, left-padded with zeros to the longest. Under autocast in its dtype.
        """
        device = key_states.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if self.block_attention:
            self.arena.write(layer_idx, key_states[0], value_states[0], self.plan)
            return key_states, value_states
        if self._pass is None or layer_idx in self._updated:  # the caller did not prepare this pass
            self._prepare_rows(key_states)
        assert self._pass is not None
        if self._pass.num_passes > 1:
            raise ValueError("consecutive passes prepared as one need block attention")
        self._updated.add(layer_idx)
        packed = [states.transpose(0, 1).flatten(1, 2) for states in (key_states, value_states)]
        self.arena.write(layer_idx, packed[0], packed[1], self.plan)
        return self._dense(layer_idx, self._pass)

    def attention_mask(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Return the mask `int64 [rows, longest]` of the dense rows, for a stock forward pass after `prepare`."""
        lengths = torch.tensor([view_length(segment.view) for segment in segments], device=self.device)
        longest = int(lengths.max())
        return (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()

    def _begin(self, forward: ForwardPass) -> ForwardPass:
        self._updated = set()
        return super()._begin(forward)

    def _prepare_rows(self, key_states: torch.Tensor) -> None:
        """Prepare a pass in which each of `rows` appends as many tokens as the batch has."""
        batch, _, length, _ = key_states.shape
        if not self.rows:
            self.rows = [[block] for block in self.new_blocks(batch, length)]
        if len(self.rows) != batch:
            raise ValueError(f"this cache has {len(self.rows)} rows, the batch has {batch}")
        held = self.get_seq_length()
        if any((view_length(view), view[-1].base + view[-1].length) != (held, held) for view in self.rows):
            raise ValueError(
                "rows of unequal lengths, or that see blocks at other positions than their own, need prepare(), its "
                "position_ids and attention_mask()"
            )
        self.prepare([Segment(view, length) for view in self.rows])

    def _dense(self, layer_idx: int, forward: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Concatenate every row's blocks, with keys rotated to the positions that the row's queries expect."""
        layer = self.storage(layer_idx)
        spec = None if self.rotary is None else self.rotary.get(layer_idx)
        longest = max(view_length(segment.view) for segment in forward.segments)
        dense: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for segment in forward.segments:
            position, keys, values = 0, [], []
            shift = view_length(segment.view[:-1]) - segment.view[-1].base
            for block in segment.view:
                stored = layer.rows(block.tokens)
                delta = (position - block.base) - shift
                k = layer.keys[stored]
                keys.append(rotate_by(k, delta, spec) if delta and spec is not None else k)
                values.append(layer.values[stored])
                position += block.length
            for rows, parts in zip(dense, (keys, values), strict=True):
                rows.append(F.pad(torch.cat(parts, dim=1), (0, 0, longest - position, 0)))
        return torch.stack(dense[0]), torch.stack(dense[1])

    # transformers.Cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest row's view in tokens."""
        return max((view_length(view) for view in self.rows), default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the index of the first new token in the dense rows."""
        if self._pass is None or self._updated:
            return self.get_seq_length(layer_idx)
        longest = max(self._pass.segments, key=lambda segment: view_length(segment.view))
        return view_length(longest.view) - longest.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the dense keys under stock attention."""
        return self.get_query_offset(layer_idx) + query_length, 0

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return -1: a block cache has no maximum length."""
        return -1

    get_max_length = get_max_cache_shape

    @property
    def batch_size(self) -> int:
        """Number of rows under stock attention; -1 if there are none yet."""
        return len(self.rows) or -1

    max_batch_size = batch_size

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select the rows `beam_idx`, int64 `[rows]`; repeated rows get a copy of the block that they append to."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, int64 `[rows]`."""
        self._select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._select_rows([row for row in range(len(self.rows)) for _ in range(repeats)])

    def _select_rows(self, chosen: Sequence[int]) -> None:
        self._check_rows()
        views = [self.rows[row] for row in chosen]
        seen = {block for view in views for block in view}
        for view in self.rows:
            if view[-1] not in seen:
                self.free(view[-1])
        for index, view in enumerate(views):
            if chosen[index] in chosen[:index]:
                views[index] = [*view[:-1], self.fork(view[-1], view[-1].free_slots)]
        self.rows = views

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row; a positive number is the new length of all rows."""
        self._check_rows()
        lengths = [view_length(view) for view in self.rows]
        for view, length in zip(self.rows, lengths, strict=True):
            left = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
            for block in view:
                self.truncate(block, min(block.length, max(left, 0)))
                left -= block.length
            if not view[-1].length:
                view[-1].base = view_length(view)

    def _check_rows(self) -> None:
        if self.blocks and not self.rows:
            raise ValueError(
                "this cache has blocks but no rows; only rows of stock attention can be selected or cropped"
            )

    def reset(self) -> None:
        """Delete everything and release all memory; the cache can then be used with another model."""
        BlockPool.reset(self)
        self.rows, self._updated = [], set()

    def __len__(self) -> int:
        return len(self.arena.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.blocks)} blocks, {sum(b.length for b in self.blocks)} tokens)"
