"""PendingPass: the forward pass that a request waits for, and its place in the pass of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from hf_parallel.cache import Segment
from hf_parallel.cache.batch import with_parts
from hf_parallel.generation.decoding.wants import Pass
from hf_parallel.generation.sampling.parts import join

MAX_DECODED = 4
"""Most new tokens of a row in a decode pass, such as draft tokens; passes with more are prefills."""
_NUM_TOKENS = attrgetter("num_tokens")


class PendingPass:
    """A forward pass that a request waits for; see `Pass`.

    `original` are the passes with the views that the mode made, and `passes` with the parts of blocks that were split.
    """

    __slots__ = ("ends", "ids", "is_prefill", "keeps_all", "num_tokens", "original", "passes", "sampling")

    def __init__(self, want: Pass) -> None:
        self.original = want.passes
        self.passes = want.passes
        self.ids = want.ids
        self.ends = want.ends
        self.sampling = want.sampling
        self.num_tokens = want.ids.size
        is_single = len(want.passes) == 1
        self.keeps_all = is_single and (self.ends is None or len(self.ends) == self.num_tokens)
        """Whether the logits of all tokens of a single pass are wanted, in their order."""
        self.is_prefill = False
        if self.num_tokens > MAX_DECODED:
            self.is_prefill = not is_single or max(map(_NUM_TOKENS, self.passes[0])) > MAX_DECODED
        """Whether it may wait for another step: a row has many new tokens, or passes that were missed are computed."""

    def expand_views(self) -> None:
        """Replace blocks that were split by their parts."""
        self.passes = [list(map(with_parts, segments)) for segments in self.original]

    @property
    def num_segments(self) -> int:
        """Number of segments of the last pass."""
        return len(self.original[-1])

    @property
    def kept_tokens(self) -> np.ndarray:
        """Indices of the tokens whose logits are computed, int64: the wanted tokens, and always the last one.

        The logits of the last token show whether the pass produced NaN.
        """
        if self.ends is None:
            return np.arange(self.num_tokens)
        counts = [segment.num_tokens for segment in chain.from_iterable(self.passes)]
        last_tokens = np.cumsum(counts) - 1  # of each segment
        last_segment = len(counts) - 1
        segments = [*self.ends]
        if last_segment not in self.ends:
            segments.append(last_segment)
        return last_tokens[segments]


class JoinedPasses(NamedTuple):
    """The passes of several requests, joined into one."""

    passes: Sequence[Sequence[Segment]]
    ids: torch.Tensor  # packed tokens, int64 [T]
    logits_to_keep: list[int] | None  # indices of the tokens whose logits are computed; None: all
    parts: list[slice]  # of the logits, by request


def join_passes(pending: Sequence[PendingPass]) -> JoinedPasses:
    """Join the passes of several requests. The last pass of each becomes the last one of all."""
    if not [request for request in pending if not request.keeps_all]:  # such as decode steps
        segments: list[Segment] = []
        for request in pending:
            segments += request.passes[0]
        parts = _slices([request.num_tokens for request in pending])
        return JoinedPasses([segments], join([request.ids for request in pending]), None, parts)
    depth = max(len(request.passes) for request in pending)
    passes: list[list[Segment]] = [[] for _ in range(depth)]
    ids: list[torch.Tensor] = []
    places: list[list[np.ndarray]] = [[] for _ in pending]  # of the tokens of each request among all
    taken = [0] * len(pending)
    total = 0
    for level, joined in enumerate(passes):
        for index, request in enumerate(pending):
            own_level = level - depth + len(request.passes)
            if own_level < 0:
                continue
            new_segments = request.passes[own_level]
            joined.extend(new_segments)
            count = sum(segment.num_tokens for segment in new_segments)
            begin = taken[index]
            ids.append(request.ids.tensor[begin : begin + count])
            places[index].append(np.arange(total, total + count))
            taken[index] += count
            total += count
    kept_by_request = [np.concatenate(runs)[request.kept_tokens] for request, runs in zip(pending, places, strict=True)]
    to_keep = np.concatenate(kept_by_request)
    keeps_all = len(to_keep) == total and bool((np.diff(to_keep) == 1).all())
    parts = _slices([len(tokens) for tokens in kept_by_request])
    for index, request in enumerate(pending):
        if request.ends is not None:  # without the logits of the last token, which it did not ask for
            begin = parts[index].start
            parts[index] = slice(begin, begin + len(request.ends))
    return JoinedPasses(passes, torch.cat(ids), None if keeps_all else to_keep.tolist(), parts)


def _slices(counts: Sequence[int]) -> list[slice]:
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
