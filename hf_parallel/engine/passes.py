"""PendingPass: the forward pass that a request waits for, and its place in the pass of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch

from hf_parallel.cache import Segment
from hf_parallel.cache.pool import parts_of

MAX_DECODED = 4
"""Most new tokens of a row in a decode pass, such as draft tokens; passes with more are prefills."""
_PARTS = attrgetter("parts")


@dataclass(eq=False, slots=True)
class PendingPass:
    """A forward pass that a request waits for: consecutive passes over packed tokens `ids`, `int64 [T]`."""

    original: Sequence[Sequence[Segment]]  # with the views that the mode made
    ids: torch.Tensor
    ends: Sequence[int] | None  # see `Executor.run`
    passes: Sequence[Sequence[Segment]]  # with the parts of blocks that were split
    num_tokens: int = field(init=False)
    is_prefill: bool = field(init=False)
    """Whether it may wait for another step: a row has many new tokens, or passes that were missed are computed."""
    keeps_all: bool = field(init=False)
    """Whether the logits of all tokens of a single pass are wanted, in their order."""

    def __post_init__(self) -> None:
        self.num_tokens, is_single = len(self.ids), len(self.original) == 1
        self.keeps_all = is_single and (self.ends is None or len(self.ends) == self.num_tokens)
        self.is_prefill = self.num_tokens > MAX_DECODED and (
            not is_single or any(segment.num_tokens > MAX_DECODED for segment in self.original[0])
        )

    def expand_views(self) -> None:
        """Replace blocks that were split by their parts. Runs for each row and step, so that it makes few calls."""
        for segments in self.original:
            for segment in segments:
                if any(map(_PARTS, segment.view)):
                    self.passes = [
                        [Segment([*parts_of(one.view)], one.num_tokens, one.write) for one in all_of_pass]
                        for all_of_pass in self.original
                    ]
                    return

    @property
    def num_segments(self) -> int:
        """Number of segments of the last pass."""
        return len(self.original[-1])

    @property
    def kept_tokens(self) -> np.ndarray:
        """Indices of the tokens whose logits are computed, int64: the wanted ones, then that of the last token.

        Logits that are not finite show that keys and values before them are not.
        """
        if self.ends is None:
            return np.arange(len(self.ids))
        last = np.cumsum([segment.num_tokens for segments in self.passes for segment in segments]) - 1
        return last[[*self.ends, *({len(last) - 1} - set(self.ends))]]


@dataclass(frozen=True, eq=False)
class JoinedPasses:
    """The passes of several requests as those of one, over packed tokens `ids`, `int64 [T]`.

    `keep` are the indices of the tokens whose logits are computed (None: all), `counts` their number for each
    request, and `wanted` the number of those that the request receives (None: all).
    """

    passes: Sequence[Sequence[Segment]]
    ids: torch.Tensor
    keep: list[int] | None
    counts: list[int]
    wanted: list[int] | None = None

    def split(self, logits: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the logits that each request receives."""
        parts = logits.split(self.counts)
        return parts if self.wanted is None else [part[:n] for part, n in zip(parts, self.wanted, strict=True)]


def join_passes(pending: Sequence[PendingPass]) -> JoinedPasses:
    """Join the passes of several requests. The last pass of each becomes the last one of all."""
    if all(one.keeps_all for one in pending):  # such as decode steps
        segments = [segment for one in pending for segment in one.passes[0]]
        return JoinedPasses(
            [segments], _packed([one.ids for one in pending]), None, [one.num_tokens for one in pending]
        )
    depth = max(len(one.passes) for one in pending)
    passes: list[list[Segment]] = [[] for _ in range(depth)]
    ids: list[torch.Tensor] = []
    places: list[list[np.ndarray]] = [[] for _ in pending]  # of the tokens of each request among all
    taken, total = [0] * len(pending), 0
    for level, joined in enumerate(passes):
        for index, one in enumerate(pending):
            own = level - depth + len(one.passes)
            if own < 0:
                continue
            joined.extend(one.passes[own])
            count = sum(segment.num_tokens for segment in one.passes[own])
            ids.append(one.ids[taken[index] : taken[index] + count])
            places[index].append(np.arange(total, total + count))
            taken[index] += count
            total += count
    kept = [np.concatenate(place)[one.kept_tokens] for one, place in zip(pending, places, strict=True)]
    keep = np.concatenate(kept)
    is_all = len(keep) == total and bool((np.diff(keep) == 1).all())
    counts = [len(one) for one in kept]
    wanted = [count if one.ends is None else len(one.ends) for one, count in zip(pending, counts, strict=True)]
    return JoinedPasses(passes, _packed(ids), None if is_all else keep.tolist(), counts, wanted)


def _packed(ids: list[torch.Tensor]) -> torch.Tensor:
    return ids[0] if len(ids) == 1 else torch.cat(ids)
