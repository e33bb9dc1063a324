"""Rows that stand: they decode step after step, and their run is resumed only when something happens to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.sampling.log_probs import LogProbs, LogProbSteps
from hf_parallel.generation.sampling.sampler import Sampler, SamplingTask
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import to_device


class TokenSink(NamedTuple):
    """Where tokens go as they are sampled: row `rows[i]`, numbered as streamers number rows, has got `tokens[i]`.

    Rows are appended before their tokens, so that another thread may read while the lists grow.
    """

    rows: list[int]
    tokens: list[int]


class TableSteps:
    """What the rows of a table have got while it had the same members, step by step."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        """A token of each row, by step."""
        self.log_probs = LogProbSteps()


class _Span(NamedTuple):
    """Consecutive steps in which rows stood, and their place among the rows of the table."""

    steps: TableSteps
    rows: slice


class StandingTokens:
    """Token ids of the passes of rows that stand, made where they are read: for a request that was preempted.

    The first pass appends the tokens with which the rows began, each other one what the step before has sampled.
    """

    def __init__(self, first_tokens: list[int], spans: list[_Span], device: torch.device) -> None:
        self.has_undrawn_pass = False
        """Whether nothing was sampled from the last pass, which then ended the rows' stand."""
        self.segments: list[list[Segment]] = []  # as the rows are not sampled from
        self._first_tokens = first_tokens
        self._spans = spans
        self._device = device

    @property
    def ids(self) -> list[torch.Tensor]:
        """Packed tokens of each pass, int64 `[rows]`."""
        steps = [self._first_tokens]
        for of_table, rows in self._spans:
            steps += [tokens[rows] for tokens in of_table.tokens]
        if not self.has_undrawn_pass:
            steps.pop()  # the last tokens were sampled, but are in no pass
        if not steps:
            return []
        packed = to_device(np.array(steps), self._device)
        return list(packed.unbind())


class Standing:
    """Rows of a call that stand, until one of them ends or for `num_steps` tokens: a want of its run.

    In each step, a row appends its last token to the last block of its view, and samples the next. The table in which
    they stand counts the steps in `stats`, and writes the tokens to `sink`, if there is one. `settle` gives the rows
    their last tokens, and the sampler's `TokenTable` all of them; if `reads_tokens`, this has them after each step.
    """

    def __init__(
        self,
        cache: BlockCache,
        sampler: Sampler,
        rows: Sequence[Row],
        num_steps: int,
        stats: GenerationStats,
        sink: TokenSink | None,
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.num_steps = num_steps
        self.stats = stats
        self.sink = sink
        self.task = SamplingTask(sampler, [row.index for row in rows])
        self.segments = [Segment(row.current_view(), 1) for row in rows]
        self.ended = [False] * len(rows)
        """Whether each row has ended."""
        self.output_rows = [row.output_row for row in rows]
        self.reads_tokens = sampler.reads_tokens
        """Whether processors or stop texts read the tokens of each step in the sampler's table."""
        self._first_tokens = [row.pending[0] for row in rows]
        self._spans: list[_Span] = []  # all but the last one have steps, and get no more
        self.logged = StandingTokens(self._first_tokens, self._spans, cache.device)
        """For the log of the request."""
        self._steps_before = 0  # steps of all spans but the last one
        self._written_spans = 0  # spans whose steps the sampler's table has
        self._written_steps = 0  # steps that it has of the next span

    @property
    def passes(self) -> list[list[Segment]]:
        """The next forward pass, as `Pass.passes`."""
        return [self.segments]

    @property
    def tokens(self) -> list[int]:
        """The last token of each row, which the next pass appends."""
        for steps, rows in self._spans[:-3:-1]:  # the last span may have no step yet
            if steps.tokens:
                return steps.tokens[-1][rows]
        return self._first_tokens

    @property
    def steps_done(self) -> int:
        """Number of tokens that each row has got."""
        return self._steps_before + (len(self._spans[-1].steps.tokens) if self._spans else 0)

    def enter(self, steps: TableSteps, rows: slice) -> None:
        """Enter a new table, as its `rows`."""
        if self._spans:
            num_steps = len(self._spans[-1].steps.tokens)
            self._steps_before += num_steps
            if not num_steps:
                self._spans.pop()
        self._spans.append(_Span(steps, rows))

    def end_step(self) -> bool:
        """Set `ended` after a step. Return whether something has happened to a row, so that the run continues.

        Must be called in each step if `reads_tokens`, else where a row may have ended.
        """
        is_last = self.steps_done == self.num_steps
        if self.reads_tokens or is_last:
            self._write_tokens()
        sampler, indices = self.task
        self.ended = sampler.row_criteria.ended_by(indices, self.tokens)
        if is_last:
            for index in sampler.row_criteria.full(indices):
                self.ended[index] = True
        return is_last or True in self.ended

    def settle(self) -> tuple[int, LogProbs | None]:
        """Give the rows their last tokens, and the sampler all tokens, with their log-probabilities if requested.

        Return the number of steps, and the log-probabilities `[steps x rows]`, step by step.
        """
        for row, token, segment in zip(self.rows, self.tokens, self.segments, strict=True):
            row.pending = [token]
            row.last_segment = segment
        self._write_tokens()
        num_steps = self.steps_done
        spans = [span for span in self._spans if span.steps.tokens]
        self._spans = []
        sampler, indices = self.task
        sampler.count_draws(indices, num_steps)
        if not num_steps or not sampler.returns_log_probs:
            return num_steps, None
        of_spans = [steps.log_probs.of_rows(rows, len(steps.tokens)) for steps, rows in spans]
        log_probs = LogProbs(*torch.cat(of_spans, dim=1))
        sampler.add_drawn(indices, self.output_rows, log_probs, num_steps)
        return num_steps, log_probs

    def _write_tokens(self) -> None:
        """Write the tokens of steps that the sampler's table does not have yet."""
        sampler, indices = self.task
        while self._written_spans < len(self._spans):
            steps, rows = self._spans[self._written_spans]
            new_steps = [tokens[rows] for tokens in steps.tokens[self._written_steps :]]
            sampler.table.append_known(indices, new_steps)
            if self._written_spans == len(self._spans) - 1:
                self._written_steps = len(steps.tokens)
                return
            self._written_spans += 1
            self._written_steps = 0
