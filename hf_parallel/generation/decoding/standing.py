"""Rows that stand: they decode step after step, and their run is resumed only when something happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.sampling.log_probs import LogProbs, LogProbSteps
from hf_parallel.generation.sampling.sampler import Sampler, SamplingTask

OnTokens = Callable[[Sequence[int], Sequence[int]], None]
"""(rows, tokens) of a step."""


@dataclass
class _Span:
    """Consecutive steps of a table in which rows stood, and their place among its rows."""

    steps: LogProbSteps
    rows: slice
    count: int = 0  # of steps, from the first one on


class Standing:
    """Rows of a call that stand, until one of them ends or for `steps` tokens: a want of its run.

    In each step, a row appends its last token to the last block of its view, and samples the next. `on_tokens` receives
    the rows, as `ParallelStreamer.write_row` numbers them, and their tokens, after each step. The rows have them after
    `settle`.
    """

    def __init__(
        self, cache: BlockCache, sampler: Sampler, rows: Sequence[Row], steps: int, on_tokens: OnTokens
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.task = SamplingTask(sampler, [row.index for row in rows])
        self.segments = [Segment(row.current_view(), 1) for row in rows]
        self.tokens = [row.pending[0] for row in rows]
        """The last token of each row, which the next pass appends."""
        self.ended = [False] * len(rows)
        """Whether each row has ended."""
        self.left = steps
        """Number of steps after which the run is resumed."""
        self.output_rows = [row.output_row for row in rows]
        self._on_tokens = on_tokens
        self._num_steps = 0  # since the rows were settled
        self._spans: list[_Span] = []

    @property
    def passes(self) -> list[list[Segment]]:
        """The next forward pass, as `Pass.passes`."""
        return [self.segments]

    def enter(self, steps: LogProbSteps, rows: slice) -> None:
        """Enter a new table: the log-probabilities of the next tokens will be those of `rows` in its steps."""
        self._spans.append(_Span(steps, rows))

    def append(self, tokens: list[int]) -> bool:
        """Append a sampled token to each row. Return whether something has happened, so that the run continues."""
        sampler, indices = self.task
        sampler.table.append_known(indices, tokens)
        self.tokens = tokens
        self.left -= 1
        self._num_steps += 1
        self._spans[-1].count += 1
        self._on_tokens(self.output_rows, tokens)
        self.ended = sampler.row_criteria.ended_by(indices, tokens)
        if self.left:
            return True in self.ended
        for place in sampler.row_criteria.full(indices):
            self.ended[place] = True
        return True

    def settle(self) -> tuple[int, LogProbs | None]:
        """Give the rows their last tokens, and the sampler the log-probabilities of all tokens since they entered.

        Return the number of steps, and the log-probabilities `[steps x rows]`, step by step, if they are requested.
        """
        for row, token, segment in zip(self.rows, self.tokens, self.segments, strict=True):
            row.pending = [token]
            row.last_segment = segment
        spans = [span for span in self._spans if span.count]
        num_steps = self._num_steps
        self._num_steps = 0
        self._spans = []
        sampler, indices = self.task
        sampler.count_draws(indices, num_steps)
        if not num_steps or not sampler.returns_log_probs:
            return num_steps, None
        log_probs = LogProbs(*torch.cat([span.steps.of_rows(span.rows, span.count) for span in spans], dim=1))
        sampler.add_drawn(indices, self.output_rows, log_probs, num_steps)
        return num_steps, log_probs
