"""Picks the backend of block attention: one operation, several ways to compute it.

`HF_PARALLEL_BACKEND` overrides the choice (`torch`, `reference`); what it names must exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from . import reference, torch_attention
from .plan import AttentionPlan
from .rope import RotarySpec

BACKEND_VARIABLE = "HF_PARALLEL_BACKEND"

_BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": torch_attention.block_attention,
    "reference": reference.block_attention,
}


def select_backend() -> str:
    """Name of the backend that block attention uses.

    Raises
    ------
    ValueError
        If `HF_PARALLEL_BACKEND` names no backend.
    """
    name = os.environ.get(BACKEND_VARIABLE) or "torch"
    if name not in _BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {sorted(_BACKENDS)}, got {name!r}")
    return name


def block_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_kv_heads: int,
    scale: float,
    rotary: RotarySpec | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of packed rows to the blocks that they see: `merge over b of softmax(rotate(q, delta_b) K_b) V_b`.

    Parameters
    ----------
    query : [T, heads, head_dim]
        Packed new tokens, rotated by the model to the positions that it was given.
    keys, values : [slots * kv_heads, head_dim]
        One layer's storage; the plan says where each block lies in it. The new tokens' own are stored already.
    plan : AttentionPlan
        What each query sees and by how much it is turned for it.
    num_kv_heads : int
        Must divide `heads` (grouped-query attention).
    scale : float
        Factor of the scores.
    rotary : RotarySpec, optional
        How this layer rotates; None for a layer without RoPE, whose queries are not turned.
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)` (Gemma 2).
    sinks : [heads], optional
        Logit of an attention sink per head, one more term of the merge (gpt-oss).
    window : int, optional
        Sliding window: positions that a query sees, itself included.

    Returns
    -------
    torch.Tensor
        `[T, heads, head_dim]` of the query's dtype.

    Notes
    -----
    Keys and values of a block are read once however many rows see it (Hydragen, section 3.2); partial results are
    merged by their log-sum-exp (Hydragen, eq. 5).
    """
    return _BACKENDS[select_backend()](
        query,
        keys,
        values,
        plan.windowed(window),
        num_kv_heads=num_kv_heads,
        scale=scale,
        rotary=rotary,
        softcap=softcap,
        sinks=sinks,
    )
