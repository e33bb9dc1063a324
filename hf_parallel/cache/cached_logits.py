"""What a LogitsCache keeps of a state: its logits, whole or cut, and what tokens are drawn from after them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

TENSOR_BYTES = 800
"""What a tensor costs beside its values, in bytes: objects on both sides of the language, and their allocations."""


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """Logits of one state, whole or cut to the highest.

    Attributes
    ----------
    values : [vocabulary] or [top_k]
        In the model's own dtype.
    ids : int32 [top_k], optional
        Tokens of the values where they are cut. Each is higher than all that were cut: equals of a logit that was cut
        are cut too, so there may be fewer than `top_k`.
    vocabulary : int
    rest : float
        Log of the probability that all others have together (at temperature 1); -inf where none was cut.
    """

    values: torch.Tensor
    ids: torch.Tensor | None
    vocabulary: int
    rest: float

    @classmethod
    def of(cls, logits: torch.Tensor, top_k: int | None) -> CachedLogits:
        """Keep logits `[vocabulary]`, all of them or the `top_k` highest."""
        size = len(logits)
        if top_k is None or top_k >= size:
            return cls(logits.detach().to("cpu", copy=True), None, size, -np.inf)
        values, ids = logits.topk(top_k + 1)
        higher = values > values[-1]
        values, ids, wide = values[higher], ids[higher], logits.float()
        rest = wide.index_fill(0, ids, -torch.inf).logsumexp(0) - wide.logsumexp(0)
        return cls(values.cpu(), ids.to("cpu", torch.int32), size, float(rest))

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        return _num_bytes(self.values) + (0 if self.ids is None else _num_bytes(self.ids))

    def serves(self, count: int, rest: float) -> bool:
        """Whether the `count` highest are kept, and those that are not have a mass of which `rest` is the log or less.

        Then whoever needs no more gets what he would from all logits.
        """
        return self.ids is None or (len(self.ids) >= count and self.rest <= rest)

    def spread(self) -> torch.Tensor:
        """The logits `[vocabulary]`; those that were cut share equally what they had together, so that sums stay.

        In float32 where any were cut: the model's own dtype may be too coarse for their share.
        """
        if self.ids is None:
            return self.values
        if not len(self.ids):
            return torch.zeros(self.vocabulary)
        ids, values = self.ids.long(), self.values.double()
        total = torch.logsumexp(values, -1) - np.log(-np.expm1(self.rest))
        each = total + self.rest - np.log(self.vocabulary - len(ids))
        whole = torch.full((self.vocabulary,), float(each), dtype=torch.float64)
        whole[ids] = values
        return whole.float()


@dataclass(frozen=True, eq=False)
class CachedDistribution:
    """The few tokens that may follow a state under certain settings of sampling, ready to draw from.

    Attributes
    ----------
    settings : str
        What made it of the logits.
    ids : int32 [n]
        Ascending.
    shares : float32 [n]
        Their probabilities; all other tokens have none.
    """

    settings: str
    ids: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(cls, shares: torch.Tensor, settings: str) -> CachedDistribution | None:
        """Keep probabilities `float32 [vocabulary]` if that takes at most a quarter of their bytes, else None."""
        ids = shares.nonzero()[:, 0]
        if 2 * len(ids) > len(shares) // 4:
            return None
        return cls(settings, ids.to("cpu", torch.int32), shares[ids].cpu())

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        return _num_bytes(self.ids) + _num_bytes(self.shares)

    def put(self, into: torch.Tensor) -> None:
        """Write the probabilities into zeros `[vocabulary]`."""
        into[self.ids.to(into.device, torch.int64)] = self.shares.to(into.device)

    def share(self, token: int) -> float:
        """Probability of a token."""
        place = int(torch.searchsorted(self.ids, token))
        return float(self.shares[place]) if place < len(self.ids) and int(self.ids[place]) == token else 0.0


def _num_bytes(tensor: torch.Tensor) -> int:
    return TENSOR_BYTES + tensor.nbytes
