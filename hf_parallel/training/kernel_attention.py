"""Attention of a layout by the CPU kernel: the bits of inference in the forward pass, PyTorch's gradients.

A trainer that computes log-probabilities by other kernels than the sampler gets other last bits, so that its first
importance ratios are not 1. Here the forward pass computes an example with the kernel, and the tiles of keys, that
computed it when it was sampled (`hf_parallel.kernels.tiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from hf_parallel.kernels import AttentionParams, AttentionPlan
from hf_parallel.kernels.torch_attention import TorchBackend, computes_natively
from hf_parallel.training.example import ParallelExample

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams], torch.Tensor]
"""Differentiable attention of a layer, as `LayoutBatch.attend`."""


class KernelLayout:
    """The blocks of the examples of a batch as one plan, over keys in the order of the examples' blocks.

    Examples are padded to `length` tokens. The plan has no padding: its queries are the tokens of all examples.
    """

    def __init__(self, examples: Sequence[ParallelExample], length: int) -> None:
        self.length = length
        num_keys = max(len(example.block_tokens) for example in examples)
        keys = np.zeros((len(examples), num_keys), np.int64)
        tokens = []
        for row, example in enumerate(examples):
            keys[row, : len(example.block_tokens)] = example.block_tokens
            tokens.append(row * length + np.arange(len(example)))
        self._keys = torch.from_numpy(keys)
        self._tokens = torch.from_numpy(np.concatenate(tokens))
        self._are_in_order = bool((keys == np.arange(length)).all()) if num_keys == length else False
        self.plan = make_plan(examples, num_keys)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of one layer, without gradients; arguments and result as those of `LayoutBatch.attend`."""
        num_rows, num_heads, length, _ = query.shape
        by_token = query.transpose(1, 2).flatten(0, 1)
        keys = self._stored(key)
        values = self._stored(value)
        attended = TorchBackend().attend(by_token.index_select(0, self._tokens), keys, values, self.plan, params)
        out = attended.new_zeros(num_rows * length, num_heads, values.shape[1])
        out.index_copy_(0, self._tokens, attended)
        return out.view(num_rows, length, num_heads, -1)

    def _stored(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values `[B, kv_heads, T, head_dim]` as a storage of blocks, one extent per example."""
        if not self._are_in_order:
            index = self._keys[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            states = states.gather(2, index)
        return states.reshape(-1, states.shape[3]).contiguous()  # a view, as of a fused projection with one KV head


class _BlockPart(NamedTuple):
    """Keys of a block at consecutive positions: tokens that moved into it have positions of other blocks."""

    block: int  # of the plan
    offset: int  # in the example's block
    length: int
    base: int  # position to which the model rotated the first key


def make_plan(examples: Sequence[ParallelExample], num_keys: int) -> AttentionPlan:
    """Return the plan of examples whose blocks lie one after the other in extents of `num_keys` slots."""
    origin: list[int] = []
    first: list[int] = []
    bases: list[int] = []
    rows: list[tuple[int, ...]] = []  # block, first query, number of queries, rotation, position and visible keys
    num_queries = 0
    for number, example in enumerate(examples):
        parts: list[list[_BlockPart]] = []  # by block
        begin = 0
        for length in example.block_lengths.tolist():
            of_block = _parts(example.position_ids[example.block_tokens[begin : begin + length]], len(origin))
            parts.append(of_block)
            first += [begin + part.offset for part in of_block]
            bases += [part.base for part in of_block]
            origin += [number * num_keys] * len(of_block)
            begin += length
        seen = zip(example.view_blocks.tolist(), example.view_starts.tolist(), example.view_stops.tolist(), strict=True)
        segments = zip(
            example.segment_lengths.tolist(),
            example.segment_positions.tolist(),
            example.view_lengths.tolist(),
            strict=True,
        )
        token = 0
        for count, position, num_seen in segments:
            moved = position - int(example.position_ids[token])
            for block, start, stop in islice(seen, num_seen):
                for part in parts[block]:
                    visible = min(part.length, stop - part.offset)
                    if visible <= 0:
                        break
                    at = start + part.offset
                    rotation = moved - (at - part.base)
                    rows.append((part.block, num_queries + token, count, rotation, position - at, visible))
            token += count
        num_queries += token
    by_position = np.argsort(np.array(bases, np.int64), kind="stable")  # the order of a plan's blocks
    ranks = np.empty_like(by_position)
    ranks[by_position] = np.arange(len(by_position))
    rows = [(int(ranks[block]), *others) for block, *others in rows]
    of_blocks = np.array([origin, first], np.int64).reshape(2, -1)[:, by_position]
    return _expand(rows, of_blocks[0], of_blocks[1], num_keys, num_queries)


def _parts(positions: np.ndarray, first_block: int) -> list[_BlockPart]:
    """Split a block whose keys were rotated to `positions` into parts, numbered from `first_block` on."""
    begins = np.flatnonzero(np.concatenate(([True], np.diff(positions) != 1))).tolist()
    ends = [*begins[1:], len(positions)]
    parts = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        parts.append(_BlockPart(first_block + number, begin, end - begin, int(positions[begin])))
    return parts


def _expand(
    rows: Sequence[tuple[int, ...]], origin: np.ndarray, first: np.ndarray, num_keys: int, num_queries: int
) -> AttentionPlan:
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    order = np.argsort(columns[0], kind="stable")
    block, query, counts, rotation, position, stop = columns[:, order]
    pairs_of_row = np.repeat(np.arange(len(block)), counts)
    index = np.arange(len(pairs_of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = position[pairs_of_row] + index
    nothing = np.empty(0, np.int64)
    return AttentionPlan(
        num_queries=num_queries,
        block_origin=origin,
        block_capacity=np.full(len(origin), num_keys, np.int64),
        block_first=first,
        block_pairs=np.concatenate(([0], np.cumsum(np.bincount(block[pairs_of_row], minlength=len(origin))))),
        pair_query=query[pairs_of_row] + index,
        pair_delta=rotation[pairs_of_row],
        pair_position=positions,
        pair_lo=np.zeros_like(positions),
        pair_hi=np.clip(positions + 1, 0, stop[pairs_of_row]),
        write_query=nothing,
        write_origin=nothing,
        write_capacity=nothing,
        write_index=nothing,
    )


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel computes a layer with these states, `[B, heads, T, head_dim]`: not under autocast."""
    if torch.is_autocast_enabled(query.device.type) or not query.dtype == key.dtype == value.dtype:
        return False
    return computes_natively(query.dtype, query.device, key.shape[3], value.shape[3])


class KernelAttention(torch.autograd.Function):
    """Attention of a layout by the kernel, whose gradients are those of the same attention in PyTorch."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        layout: KernelLayout,
        attend: Attend,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Return the attention of `layout`; `attend` computes it again for the gradients."""
        ctx.save_for_backward(query, key, value, sinks)
        ctx.attend = attend
        ctx.params = params
        return layout.attend(query, key, value, params)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        (grad,) = grad_outputs
        leaves: list[torch.Tensor | None] = []
        for tensor, is_needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False):
            leaves.append(None if tensor is None else tensor.detach().requires_grad_(is_needed))
        query, key, value, sinks = leaves
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with torch.enable_grad():
            params = ctx.params if sinks is None else replace(ctx.params, sinks=sinks)
            out = ctx.attend(query, key, value, params)
            gradients = iter(torch.autograd.grad(out, wanted, grad))
        of_tensors = [next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return (*of_tensors, None, None, None)
