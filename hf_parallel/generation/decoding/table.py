"""DecodeTable: rows of many calls that stand. A step appends one token to each, with one pass and one draw for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.batch import with_parts
from hf_parallel.generation.decoding.standing import Standing, TableSteps, TokenSink
from hf_parallel.generation.decoding.wants import Pass
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import SamplingBatch, cannot_draw
from hf_parallel.kernels import HostCopy, to_device


class DecodeTable:
    """The rows that stand in one step, of all calls, over the storage of a cache."""

    def __init__(self, cache: BlockCache) -> None:
        self.members: Sequence[Standing] = ()
        self.sizes: list[int] = []
        """Number of rows of each member."""
        self._cache = cache
        self._batch: SamplingBatch
        self._segments: list[Segment] = []
        self._version = -1  # of the pool, with whose blocks the segments have been compared
        self._ids = Part(torch.empty(0, dtype=torch.int64))
        self._steps = TableSteps()
        self._end_tokens: list[frozenset[int]] = []  # by row
        self._every_end_token: frozenset[int] = frozenset()
        self._member_of: list[int] = []  # by row
        self._sinks: list[tuple[int, slice, TokenSink, list[int]]] = []
        """Each member with a sink: its index, rows, sink, and the rows of its output."""
        self._sinks_of_one: list[tuple[int, int, TokenSink, int]] = []
        """Those of one row, whose tokens are written faster."""
        self._readers: set[int] = set()  # members that read the tokens of each step
        self._last_steps: dict[int, list[int]] = {}  # members by the number of their last step, counted with this table

    def choose(self, members: Sequence[Standing]) -> None:
        """Choose the members of the next step."""
        if members == self.members:
            return
        self.members = members
        if not members:
            return
        self.sizes = [len(member.rows) for member in members]
        self._batch = SamplingBatch([member.task for member in members])
        self._segments = [segment for member in members for segment in member.segments]
        self._version = -1
        tokens = [token for member in members for token in member.tokens]
        self._ids = Part(to_device(tokens, self._cache.device))
        self._steps = TableSteps()
        self._end_tokens = []
        self._member_of = []
        self._sinks = []
        self._sinks_of_one = []
        self._readers = set()
        self._last_steps = {}
        for index, (member, rows) in enumerate(zip(members, self._batch.parts, strict=True)):
            member.steps.enter(self._steps, rows.start)
            self._end_tokens += [member.task.sampler.row_criteria.end_tokens] * len(member.rows)
            self._member_of += [index] * len(member.rows)
            if member.sink is not None and len(member.output_rows) == 1:
                self._sinks_of_one.append((index, rows.start, member.sink, member.output_rows[0]))
            elif member.sink is not None:
                self._sinks.append((index, rows, member.sink, member.output_rows))
            if member.reads_tokens:
                self._readers.add(index)
            steps_left = member.num_steps - len(member.steps)
            self._last_steps.setdefault(steps_left, []).append(index)
        self._every_end_token = frozenset().union(*set(self._end_tokens))

    def next_pass(self) -> Pass:
        """Return the pass that appends the last token of each row."""
        if self._version != self._cache.pool.version:  # blocks may have been split
            self._segments = [with_parts(segment) for segment in self._segments]
            self._version = self._cache.pool.version
        return Pass(self._cache, [self._segments], self._ids)

    def parts(self, logits: Part) -> list[Part]:
        """Return the logits of each member, of those of all."""
        first = logits.rows.start
        parts = []
        for part in self._batch.parts:
            rows = slice(first + part.start, first + part.stop)
            parts.append(Part(logits.whole, rows))
        return parts

    def advance(self, logits: Part) -> list[tuple[int, BaseException | None]]:
        """Sample and append a token of each row, given the logits of the pass, `[rows, vocabulary]`.

        Return the indices of members to which something has happened, so that their runs continue, each with the error
        that ends it, or None. Raises `CannotDrawError` if rows cannot be drawn together; then none has got a token.
        """
        draws = self._batch.draw([logits])
        log_probs = self._batch.known(draws)
        if log_probs is not None:
            self._steps.log_probs.append(*log_probs)
        self._ids = Part(draws.tokens)
        if draws.marks is None:
            tokens = HostCopy(draws.tokens).values
            failed: dict[int, BaseException | None] = {}
        else:
            tokens, marks = HostCopy(torch.stack((draws.tokens, draws.marks))).values
            failed = self._cannot_draw(marks)
        self._steps.tokens.append(tokens)
        for index, rows, sink, output_rows in self._sinks:
            if index not in failed:
                sink.rows.extend(output_rows)
                sink.tokens.extend(tokens[rows])
        for index, row, sink, output_row in self._sinks_of_one:
            if index not in failed:
                sink.rows.append(output_row)
                sink.tokens.append(tokens[row])
        happened = dict(failed)
        for index in self._touched(tokens):
            if index not in failed:
                try:
                    if self.members[index].end_step():
                        happened[index] = None
                except Exception as error:  # of a criterion
                    happened[index] = error
        return sorted(happened.items())

    def _touched(self, tokens: Sequence[int]) -> Iterable[int]:
        """Return the members to which something may have happened in a step of `tokens`."""
        touched = self._readers.union(self._last_steps.get(len(self._steps.tokens), ()))
        if self._every_end_token.isdisjoint(tokens):
            return touched
        for member, token, end_tokens in zip(self._member_of, tokens, self._end_tokens, strict=True):
            if token in end_tokens:
                touched.add(member)
        return touched

    def _cannot_draw(self, marks: Sequence[int]) -> dict[int, BaseException | None]:
        """Return the error of each member with rows whose token cannot be drawn."""
        errors: dict[int, BaseException | None] = {}
        if any(marks):
            for index, rows in enumerate(self._batch.parts):
                invalid = [row for row, mark in enumerate(marks[rows]) if mark]
                if invalid:
                    errors[index] = cannot_draw(invalid)
        return errors
