"""DecodeTable: rows of many calls that stand. A step appends one token to each, with one pass and one draw for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.pass_log import LoggedSteps
from hf_parallel.generation.decoding.standing import Standing
from hf_parallel.generation.decoding.wants import Pass
from hf_parallel.generation.sampling.log_probs import LogProbSteps
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import SamplingBatch, cannot_draw
from hf_parallel.kernels import HostCopy, to_device


class DecodeTable:
    """The rows that stand in one step, of all calls, over the storage of a cache."""

    def __init__(self, cache: BlockCache) -> None:
        self.members: Sequence[Standing] = ()
        self.logged: LoggedSteps | None = None
        """The passes since the table has had its members, for the logs of their requests; None: there was none."""
        self._cache = cache
        self._batch: SamplingBatch
        self._segments: list[Segment] = []
        self._ids = Part(torch.empty(0, dtype=torch.int64))
        self._log_probs = LogProbSteps()

    def choose(self, members: Sequence[Standing]) -> None:
        """Choose the members of the next step."""
        if members == self.members:
            return
        self.members = members
        self.logged = None
        if not members:
            return
        self._batch = SamplingBatch([member.task for member in members])
        self._segments = [segment for member in members for segment in member.segments]
        self._log_probs = LogProbSteps()
        for member, rows in zip(members, self._batch.parts, strict=True):
            member.enter(self._log_probs, rows)
        tokens = [token for member in members for token in member.tokens]
        self._ids = Part(to_device(tokens, self._cache.device))

    def next_pass(self) -> Pass:
        """Return the pass that appends the last token of each row."""
        return Pass(self._cache, [self._segments], self._ids)

    def parts(self, logits: Part) -> list[Part]:
        """Return the logits of each member, of those of all."""
        first = logits.rows.start
        return [Part(logits.whole, slice(first + part.start, first + part.stop)) for part in self._batch.parts]

    def advance(self, logits: Part) -> list[bool | BaseException]:
        """Sample and append a token of each row, given the logits of the pass, `[rows, vocabulary]`.

        Return for each member whether its run continues, or an error that ends it. Raises `CannotDrawError` if rows
        cannot be drawn together; then none has got a token.
        """
        draws = self._batch.draw([logits])
        known = self._batch.known(draws)
        if known is not None:
            self._log_probs.append(*known)
        self._ids = Part(draws.tokens)
        host = HostCopy(draws.tokens if draws.marks is None else torch.stack((draws.tokens, draws.marks)))
        tokens = host.values
        invalid = set[int]()
        if draws.marks is not None:
            tokens, marks = tokens
            invalid = {row for row, mark in enumerate(marks) if mark}
        results: list[bool | BaseException] = []
        for member, part in zip(self.members, self._batch.parts, strict=True):
            if invalid and (rows := invalid.intersection(range(part.start, part.stop))):
                results.append(cannot_draw([row - part.start for row in sorted(rows)]))
                continue
            try:
                results.append(member.append(tokens[part]))
            except Exception as error:  # of a criterion
                results.append(error)
        return results
