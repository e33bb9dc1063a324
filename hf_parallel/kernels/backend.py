"""AttentionBackend: what an implementation of block attention provides."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.storage import CompactStorage, TokenRange


class AttentionBackend(Protocol):
    """Reads and writes the storage of a layer, `keys` and `values` `[slots * kv_heads, head_dim]`."""

    capturable: bool
    """Whether a CUDA graph can capture its kernels: all inputs that change are in device memory."""

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        params: AttentionParams,
        compact: CompactStorage | None = None,
    ) -> Tensor:
        """Return the attention of packed queries; see `hf_parallel.kernels.block_attention`."""

    def append(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, plan: AttentionPlan) -> None:
        """Store the new keys and values `[kv_heads, T, head_dim]` of a pass at the locations that its plan gives."""

    def move(
        self,
        keys: Tensor,
        values: Tensor,
        num_kv_heads: int,
        source: TokenRange,
        target: TokenRange,
        delta: int = 0,
        rotary: RotarySpec | None = None,
    ) -> None:
        """Copy tokens to a range of the same length that does not overlap; rotate their keys by `delta` positions.

        Without `rotary` (a layer without RoPE), keys are not rotated.
        """
