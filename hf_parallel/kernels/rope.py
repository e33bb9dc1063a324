"""RotarySpec: how a layer turns its queries and keys, and the turn by a further angle that block attention needs.

A rotation is additive: a query that the model rotated to position `rho` and that is turned by `delta` stands at
`rho + delta` (Hogwild! Inference, section 3.4). Scaling of the embeddings themselves (YaRN's attention factor) is
in what the model gives already and is not applied again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class RotarySpec:
    """The rotary embedding of one layer. Dimensions from `rotary_dim` on are left alone (partial rotary).

    Parameters
    ----------
    inv_freq : tuple of float
        Radians per position of each rotated pair, `rotary_dim / 2` of them, after any scaling (linear, Llama-3, YaRN).
    interleaved : bool
        Pairs are dimensions `(2i, 2i + 1)` if True, `(i, i + rotary_dim / 2)` if False.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that turn."""
        return 2 * len(self.inv_freq)

    @cached_property
    def _inv_freq(self) -> np.ndarray:
        return np.asarray(self.inv_freq, dtype=np.float64)

    def tables(self, delta: np.ndarray, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of turns by `delta` positions.

        Parameters
        ----------
        delta : int64 [N]
            Positions, of any sign. Angles are computed in float64 whatever `dtype` is.

        Returns
        -------
        (cos, sin) : [N, rotary_dim / 2] of `dtype` on `device`
        """
        angles = torch.from_numpy(np.multiply.outer(delta.astype(np.float64), self._inv_freq))
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: RotarySpec) -> torch.Tensor:
    """Turn the leading `spec.rotary_dim` dimensions of `x`.

    Parameters
    ----------
    x : [..., head_dim]
        Queries or keys.
    cos, sin : broadcastable to [..., rotary_dim / 2]
        From `spec.tables`.

    Returns
    -------
    torch.Tensor
        Same shape and dtype as `x`; computed in the dtype of the tables.
    """
    turned, rest = x[..., : spec.rotary_dim].to(cos.dtype), x[..., spec.rotary_dim :]
    if spec.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    out = out.to(x.dtype)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out
