"""AttentionParams: the parameters of one layer's block attention, besides its tensors and the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_parallel.kernels.rope import RotarySpec


@dataclass(eq=False, slots=True)
class AttentionParams:
    """Parameters of block attention that a layer's configuration determines.

    Attributes
    ----------
    num_kv_heads : int
        Must divide the number of query heads (grouped-query attention).
    scale : float
        Factor of the scores, usually `head_dim ** -0.5`.
    rotary : RotarySpec, optional
        Rotary embedding of the layer. None: the layer has no RoPE, and its queries are not rotated.
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)` (Gemma 2).
    sinks : [heads], optional
        Logit of an attention sink per head, one more term of the merge (gpt-oss).
    window : int, optional
        Sliding window: number of positions that a query sees, its own included.
    """

    num_kv_heads: int
    scale: float
    rotary: RotarySpec | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None
