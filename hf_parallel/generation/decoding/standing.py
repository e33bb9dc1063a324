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


class StandingSteps:
    """What rows have got while they stood, step after step: the tables in which they stood, and their place in each.

    For the log of a request it is the tokens of the passes, `StepTokens`: the first pass appends the tokens with which
    the rows began, each other one what the step before has sampled. They are made where a log is read, after a
    preemption.
    """

    def __init__(self, first_tokens: list[int], device: torch.device) -> None:
        self.has_undrawn_pass = False
        """Whether there was a pass after which nothing was sampled here, which ended the rows' stand."""
        self.segments: list[list[Segment]] = []  # as the log needs no samples
        self._first_tokens = first_tokens
        self._device = device
        self._tables: list[TableSteps] = []  # all but the last one have steps, and get no more
        self._first_rows: list[int] = []  # in each table
        self._steps_before = 0  # steps of all tables but the last one

    def __len__(self) -> int:
        return self._steps_before + (len(self._tables[-1].tokens) if self._tables else 0)

    def enter(self, table: TableSteps, first_row: int) -> None:
        """Enter a new table."""
        if self._tables:
            num_steps = len(self._tables[-1].tokens)
            self._steps_before += num_steps
            if not num_steps:
                self._tables.pop()
                self._first_rows.pop()
        self._tables.append(table)
        self._first_rows.append(first_row)

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each row."""
        for table, first in zip(self._tables[:-3:-1], self._first_rows[:-3:-1], strict=True):  # the last may be empty
            if table.tokens:
                return table.tokens[-1][first : first + len(self._first_tokens)]
        return self._first_tokens

    def tokens(self, count: int) -> list[list[int]]:
        """Return the tokens of the last `count` steps."""
        steps: list[list[int]] = []  # the last one first
        for table, first in zip(reversed(self._tables), reversed(self._first_rows), strict=True):
            missing = count - len(steps)
            if not missing:
                break
            rows = slice(first, first + len(self._first_tokens))
            steps += [tokens[rows] for tokens in reversed(table.tokens[-missing:])]
        return steps[::-1]

    def log_probs(self) -> torch.Tensor:
        """Return the log-probabilities of the tokens, float32 `[2, steps x rows]`, step by step; see `LogProbSteps`."""
        of_tables = []
        for table, first in zip(self._tables, self._first_rows, strict=True):
            if table.tokens:
                of_tables.append(table.log_probs.of_rows(first, len(self._first_tokens)))
        return torch.cat(of_tables, dim=1).flatten(1)

    @property
    def ids(self) -> list[torch.Tensor]:
        """Packed tokens of each pass, int64 `[rows]`."""
        steps = [self._first_tokens, *self.tokens(len(self))]
        if not self.has_undrawn_pass:
            steps.pop()  # the last tokens were sampled, but are in no pass
        if not steps:
            return []
        packed = to_device(np.array(steps), self._device)
        return list(packed.unbind())


class Standing:
    """Rows of a call that stand, until one of them ends or for `num_steps` tokens: a want of its run.

    In each step, a row appends its last token to the last block of its view, and samples the next. The table in which
    they stand writes the tokens to `sink`, if there is one. `settle` gives the rows their last tokens, and the
    sampler's `TokenTable` all of them; if `reads_tokens`, this has them after each step.
    """

    def __init__(
        self,
        cache: BlockCache,
        sampler: Sampler,
        rows: Sequence[Row],
        num_steps: int,
        sink: TokenSink | None,
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.num_steps = num_steps
        self.sink = sink
        self.task = SamplingTask(sampler, [row.index for row in rows])
        self.segments = [Segment(tuple(row.current_view()), 1) for row in rows]
        self.ended = [False] * len(rows)
        """Whether each row has ended."""
        self.output_rows = [row.output_row for row in rows]
        self.reads_tokens = sampler.reads_tokens
        """Whether processors or stop texts read the tokens of each step in the sampler's table."""
        self.steps = StandingSteps([row.pending[0] for row in rows], cache.device)
        self._written_steps = 0  # steps that the sampler's table has

    @property
    def passes(self) -> list[list[Segment]]:
        """The next forward pass, as `Pass.passes`."""
        return [self.segments]

    @property
    def tokens(self) -> list[int]:
        """The last token of each row, which the next pass appends."""
        return self.steps.last_tokens

    def end_step(self) -> bool:
        """Set `ended` after a step. Return whether something has happened to a row, so that the run continues.

        Must be called in each step if `reads_tokens`, else where a row may have ended.
        """
        is_last = len(self.steps) == self.num_steps
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
        num_steps = len(self.steps)
        sampler, indices = self.task
        sampler.count_draws(indices, num_steps)
        if not num_steps or not sampler.returns_log_probs:
            return num_steps, None
        log_probs = LogProbs(*self.steps.log_probs())
        sampler.add_drawn(indices, self.output_rows, log_probs, num_steps)
        return num_steps, log_probs

    def _write_tokens(self) -> None:
        """Write the tokens of steps that the sampler's table does not have yet."""
        sampler, indices = self.task
        num_steps = len(self.steps)
        sampler.table.append_known(indices, self.steps.tokens(num_steps - self._written_steps))
        self._written_steps = num_steps
