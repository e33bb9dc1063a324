"""RoPE: a layer's rotary embedding, and the rotation of queries and keys by further positions.

Rotations add up: a query at position `rho` that is rotated by `delta` is at position `rho + delta` (Hogwild! Inference,
section 3.4). Scaling of the embeddings themselves (YaRN's attention factor) is part of the model's queries and keys
and is not applied again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RotarySpec:
    """The rotary embedding of one layer. Dimensions from `rotary_dim` on are not rotated (partial rotary).

    Parameters
    ----------
    inv_freq : tuple of float
        Radians per position of each rotated pair, `rotary_dim / 2` of them, after any scaling (linear, Llama-3, YaRN).
    interleaved : bool
        Pairs are dimensions `(2i, 2i + 1)` if True, `(i, i + rotary_dim / 2)` if False.
    of_values : bool
        Whether the layer stores the rotated part of its keys in the place of values, as it stores latents in the place
        of keys (see `LatentHeads`).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    of_values: bool = False

    def __hash__(self) -> int:
        return self._hash  # every layer looks up what is made for its rotary embedding

    @cached_property
    def _hash(self) -> int:
        return hash((self.inv_freq, self.interleaved, self.of_values))

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that are rotated."""
        return 2 * len(self.inv_freq)

    def tables(self, delta: np.ndarray, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, `[N, rotary_dim / 2]` of `dtype`, of rotations by `delta` positions (int64 `[N]`).

        Angles are computed in float64 whatever `dtype` is.
        """
        angles = torch.from_numpy(np.multiply.outer(delta.astype(np.float64), self.inv_freq))
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: RotarySpec) -> Tensor:
    """Rotate the leading `spec.rotary_dim` dimensions of queries or keys.

    Parameters
    ----------
    x : [..., head_dim]
    cos, sin : broadcastable to [..., rotary_dim / 2]
        From `spec.tables`. The rotation is computed in their dtype; the result has the dtype of `x`.
    """
    leading = x[..., : spec.rotary_dim].to(cos.dtype)
    unrotated = x[..., spec.rotary_dim :]
    if spec.interleaved:
        a = leading[..., 0::2]
        b = leading[..., 1::2]
    else:
        a, b = leading.chunk(2, dim=-1)
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    if spec.interleaved:
        out = torch.stack((rotated_a, rotated_b), dim=-1).flatten(-2)
    else:
        out = torch.cat((rotated_a, rotated_b), dim=-1)
    out = out.to(x.dtype)
    if unrotated.shape[-1]:
        out = torch.cat((out, unrotated), dim=-1)
    return out


def rotate_by(x: Tensor, delta: int, spec: RotarySpec) -> Tensor:
    """Rotate queries or keys `[..., head_dim]` by `delta` positions, in float32 (float64 if `x` is float64)."""
    return rotate(x, *_shift_tables(spec, delta, table_dtype(x.dtype), x.device), spec)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which tensors of `dtype` are rotated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=8)
def _shift_tables(spec: RotarySpec, delta: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables `[1, rotary_dim / 2]` of one rotation, shared by all layers with the same rotary embedding."""
    with torch.inference_mode(False):  # later uses may need gradients
        return spec.tables(np.array([delta]), dtype, device)
