"""Attention over blocks that many rows share: each block of keys and values is stored once, and read once for all rows.

A row attends to an ordered list of blocks. Where a block has another position in one row than in another, the row's
query is rotated by the difference, not the keys (Hydragen, arXiv:2402.05099; Hogwild! Inference, arXiv:2504.06261).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .attend import attend
from .launch import LayerShape
from .plan import AttentionParams, AttentionPlan
from .rope import RotarySpec

__all__ = ["AttentionPlan", "Block", "RotarySpec", "Row", "block_attention", "make_plan"]


@dataclass(frozen=True)
class Block:
    """A run of tokens, stored contiguously as `[kv_heads, length, head_dim]` from slot `slot` on.

    `keys` and `values` are `[slots * kv_heads, head_dim]`, and slot `s` begins at row `s * kv_heads`.
    """

    slot: int
    length: int
    base: int = 0
    """Position to which the block's first key is rotated."""


@dataclass(frozen=True)
class Row:
    """A sequence: the numbers of its blocks in order, and how many of its last tokens are queries.

    The queries are the last tokens of the last block, rotated as its keys are.
    """

    blocks: tuple[int, ...]
    num_queries: int = 1


def make_plan(blocks: Sequence[Block], rows: Sequence[Row]) -> AttentionPlan:
    """Return the plan of a pass, which all layers share. Queries are packed, those of the first row first.

    Raises `ValueError` if a row has no block, a block twice, or more queries than its last block has tokens.
    """
    pairs = []  # block, query, delta, position, hi
    query = 0
    for number, row in enumerate(rows):
        if not row.blocks or len(set(row.blocks)) < len(row.blocks):
            raise ValueError(f"blocks of row {number} must be different and at least one, got {row.blocks}")
        last = blocks[row.blocks[-1]]
        if not 1 <= row.num_queries <= last.length:
            raise ValueError(f"num_queries of row {number} must be 1 to {last.length}, got {row.num_queries}")
        starts = np.cumsum([0, *(blocks[index].length for index in row.blocks)])
        for offset in range(last.length - row.num_queries, last.length):
            in_row = int(starts[len(row.blocks) - 1]) + offset
            rotated = last.base + offset
            for index, start in zip(row.blocks, starts, strict=False):
                position = in_row - int(start)
                delta = position - (rotated - blocks[index].base)
                pairs.append((index, query, delta, position, min(blocks[index].length, position + 1)))
            query += 1
    table = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 5)
    used, counts = np.unique(table[:, 0], return_counts=True)
    none = np.zeros(0, np.int64)
    return AttentionPlan(
        num_queries=query,
        block_origin=np.array([blocks[index].slot for index in used], np.int64),
        block_capacity=np.array([blocks[index].length for index in used], np.int64),
        block_first=np.zeros(len(used), np.int64),
        block_pairs=np.concatenate(([0], np.cumsum(counts))),
        pair_query=table[:, 1].copy(),
        pair_delta=table[:, 2].copy(),
        pair_position=table[:, 3].copy(),
        pair_lo=np.zeros(len(table), np.int64),
        pair_hi=table[:, 4].copy(),
        write_query=none,
        write_origin=none,
        write_capacity=none,
        write_index=none,
    )


def block_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    num_kv_heads: int,
    scale: float | None = None,
    *,
    rotary: RotarySpec | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention of queries over the blocks of their rows: `[T, heads, value_dim]`.

    Parameters
    ----------
    query : Tensor
        `[T, heads, head_dim]`; float16, bfloat16 or float32.
    keys, values : Tensor
        `[slots * kv_heads, head_dim]` and `[slots * kv_heads, value_dim]`, see `Block`.
    plan : AttentionPlan
        Of `make_plan`.
    num_kv_heads : int
        Divides the number of query heads.
    scale : float, optional
        Of the scores. Default: `head_dim ** -0.5`.
    rotary : RotarySpec, optional
        Rotary embedding of the keys. None: queries are not rotated to the positions of blocks.
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)`.
    sinks : Tensor, optional
        `[heads]`. Logit of an attention sink for each head.
    window : int, optional
        Positions that a query sees, its own included.

    Raises
    ------
    ValueError
        If shapes contradict each other.
    """
    tokens, heads, head_dim = query.shape
    if heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the {heads} heads of the queries, got {num_kv_heads}")
    if tokens != plan.num_queries or keys.shape[1] != head_dim or len(keys) != len(values):
        shapes = [tuple(tensor.shape) for tensor in (query, keys, values)]
        raise ValueError(f"queries of the plan ({plan.num_queries}), keys and values do not fit, got shapes {shapes}")
    params = AttentionParams(num_kv_heads, scale or head_dim**-0.5, rotary, softcap, sinks, window)
    shape = LayerShape(
        groups=heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=values.shape[1],
        dtype=query.dtype,
        device=query.device,
        window=window,
        rotary=rotary,
    )
    return attend(query, (keys, values, keys, keys), plan, params, shape)
