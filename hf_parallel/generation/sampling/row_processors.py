"""The logits processors and stopping criteria of a call, over rows of unequal length.

Several calls apply their processors together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from hf_parallel.generation.sampling.processors import (
    MinLengthProcessor,
    OccurrencePenalty,
    ProcessorBatch,
    RowOccurrence,
    RowPenalty,
    RowWise,
    check_signature,
    is_stateful,
    needs_batch,
    split_warpers,
    stage_of,
)
from hf_parallel.generation.sampling.stop_texts import RowStops, StopTexts
from hf_parallel.generation.sampling.token_table import TokenTable, group_by
from hf_parallel.kernels import to_device
from hf_parallel.kernels.sampling import Warpers

Stage = tuple[tuple[int, int], RowWise | None, list[LogitsProcessor]]
"""A row-wise processor, with its place in the order of `generate` and its function; or successive other processors."""
_OTHERS = (-1, -1)


class RowProcessors(list[LogitsProcessor]):
    """Processors of the rows in a table, in their order.

    Row-wise ones (`STAGES`) run over all rows at once. Others of Transformers receive `rows`, the active ones, in
    groups of equal length. If one of the caller's may keep state per row, those that are not row-wise receive the whole
    batch at every step, as under `generate`.
    """

    def __init__(self, given: Iterable[LogitsProcessor], table: TokenTable) -> None:
        super().__init__()
        self.table = table
        self.rows: Sequence[int] = ()
        for processor in given:
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                self.append(RowPenalty(processor, table))
            elif type(processor) is OccurrencePenalty:
                self.append(RowOccurrence(processor, table))
            else:
                check_signature(processor)
                self.append(MinLengthProcessor.convert(processor))
        self.needs_batch = any(needs_batch(processor) for processor in self)
        self.is_stateful = any(is_stateful(processor) for processor in self)

    def fork(self, row: int, count: int) -> None:
        """Add `count` copies of a row."""
        for processor in self:
            if isinstance(processor, RowPenalty):
                processor.ignored += [processor.ignored[row]] * count

    @cached_property
    def stages(self) -> list[Stage]:
        """The processors by stage."""
        stages: list[Stage] = []
        for processor in self:
            stage = stage_of(processor)
            if stage is not None:
                number, function = stage
                repetition = sum(number == other for (other, _), *_ in stages)
                stages.append(((number, repetition), function, [processor]))
            elif stages and stages[-1][1] is None:
                stages[-1][2].append(processor)
            else:
                stages.append((_OTHERS, None, [processor]))
        return stages

    @cached_property
    def is_row_wise(self) -> bool:
        """Whether all are row-wise and in the order of `generate`, so that several calls can run theirs together."""
        order = [key for key, _, _ in self.stages]
        return order == sorted(order) and _OTHERS not in order

    @cached_property
    def fused(self) -> tuple[int, Warpers]:
        """Number of stages before the last warpers, and the settings of these, which one operation applies."""
        head, warpers = split_warpers(self)
        return len(self.stages) - (len(self) - len(head)), warpers

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether they may depend on the tokens of rows, or their number, as all but the last warpers may."""
        return self.fused[0] > 0

    def call(self, processors: Sequence[LogitsProcessor], rows: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Apply processors that are not row-wise."""
        self.rows = rows
        table = self.table
        if not self.needs_batch:
            groups = group_by(table.lengths[row] for row in rows)
            if len(groups) == 1:
                return _call(processors, table.left_padded(rows), scores)
            out = torch.empty_like(scores)
            for group in groups:
                self.rows = [rows[index] for index in group]
                indices = to_device(group, out.device)
                processed = _call(processors, table.left_padded(self.rows), scores[indices])
                out[indices] = processed.to(out.dtype)
            self.rows = rows
            return out
        if len(rows) == len(table.lengths):
            return _call(processors, table.left_padded(rows), scores)
        index = table.index(rows)
        batch = scores.new_zeros(len(table.lengths), scores.shape[-1])
        batch[index] = scores
        return _call(processors, table.whole_batch(rows), batch)[index]

    def ahead(self, scores: torch.Tensor, length: int) -> torch.Tensor:
        """Apply the processors, which do not depend on the tokens, to scores `[1, vocabulary]` of a row of `length`
        tokens. Other processors than row-wise ones may write to the scores. Thread-safe."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.table.device).expand(1, length)
        for _, function, processors in self.stages:
            if function is None:
                scores = _call(processors, ids, scores)
            else:
                scores = function(scores, ProcessorBatch(processors, [0], [length]))
        return scores


class CallRows(NamedTuple):
    """Rows of one call, with its processors; `is_fused`: but for the last warpers, see `RowProcessors.fused`."""

    processors: RowProcessors
    rows: Sequence[int]
    is_fused: bool = False


class JointProcessors:
    """The processors of one call, or of several that are row-wise, over the rows of all calls.

    It can be called step after step, as the rows get one token after the other.
    """

    def __init__(self, calls: Sequence[CallRows]) -> None:
        self._calls = calls
        self._num_rows = sum(len(rows) for _, rows, _ in calls)
        stages: dict[tuple[int, int], tuple[RowWise | None, ProcessorBatch, list[int]]] = {}
        begin = 0
        for processors, rows, is_fused in calls:
            of_call = processors.stages
            if is_fused and processors:
                of_call = of_call[: processors.fused[0]]
            for number, (key, function, members) in enumerate(of_call):
                if len(calls) == 1:
                    key = (number, 0)  # noqa: PLW2901
                if key not in stages:
                    stages[key] = (function, ProcessorBatch([], [], []), [])
                _, step, indices = stages[key]
                step.processors.extend(members if function is None else members * len(rows))
                step.rows.extend(rows)
                indices.extend(range(begin, begin + len(rows)))
            begin += len(rows)
        self._stages = [stage for _, stage in sorted(stages.items())]
        self._reads_tokens = any(processors.reads_tokens for processors, *_ in calls)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply them to logits `[rows of all calls, vocabulary]`.

        Return scores: a float32 copy unless a processor returns another dtype; without processors the logits.
        """
        if not self._stages:
            return logits
        lengths = self._lengths() if self._reads_tokens else [0] * self._num_rows
        scores = logits.to(torch.float32)
        for function, step, indices in self._stages:
            writes = function is None or len(indices) < self._num_rows
            if writes and scores is logits:
                scores = scores.clone()
            if function is None:
                scores = self._calls[0].processors.call(step.processors, step.rows, scores)
            elif len(indices) == self._num_rows:
                step.lengths[:] = lengths
                scores = function(scores, step)
            else:
                step.lengths[:] = [lengths[index] for index in indices]
                index = to_device(indices, scores.device)
                scores.index_copy_(0, index, function(scores[index], step))
        return scores

    def _lengths(self) -> list[int]:
        """Return the number of tokens of each row."""
        lengths: list[int] = []
        for processors, rows, _ in self._calls:
            lengths += map(processors.table.lengths.__getitem__, rows)
        return lengths


def _call(processors: Sequence[LogitsProcessor], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    processed: object = scores
    for processor in processors:  # `LogitsProcessorList` would inspect each signature at every step
        processed = processor(ids, processed)
    if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
        got = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
        raise ValueError(f"a logits_processor must return scores of the shape {list(scores.shape)}, got {got}")
    return processed


class RowCriteria:
    """Criteria of the rows in a table.

    Rows end at a maximum length, by a token in `end_tokens` or at a stop text. If `is_row_wise`, that is all. Other
    criteria are called with the rows in groups of equal length, or with the whole batch if one of them may keep state
    per row.
    """

    def __init__(self, criteria: StoppingCriteriaList, table: TokenTable) -> None:
        self.table = table
        self._limits = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        end_tokens: set[int] = set()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                end_tokens.update(criterion.eos_token_id.flatten().tolist())
        self.end_tokens = frozenset(end_tokens)
        self._stops = [RowStops(criterion, table) for criterion in criteria if isinstance(criterion, StopTexts)]
        row_wise = (MaxLengthCriteria, EosTokenCriteria, StopTexts)
        self._others = [criterion for criterion in criteria if type(criterion) not in row_wise]
        self.is_row_wise = not self._others
        self.needs_batch = any(needs_batch(criterion) for criterion in self._others)

    @property
    def has_stops(self) -> bool:
        """Whether rows end at stop texts."""
        return bool(self._stops)

    def full(self, rows: Sequence[int]) -> list[int]:
        """Return the indices of rows that have the maximum length."""
        full = []
        lengths = self.table.lengths
        for criterion in self._limits:
            limit = criterion.max_length
            warned = criterion.max_position_embeddings
            for index, row in enumerate(rows):
                if lengths[row] >= limit:
                    full.append(index)
                elif warned is not None and lengths[row] > warned:
                    criterion(self.table.ids[:1, : lengths[row]], None)  # logs a warning
        return full

    def steps_left(self, rows: Sequence[int]) -> int:
        """Return how many tokens each row can get before `full` has something to say."""
        longest = max(self.table.lengths[row] for row in rows)
        left = sys.maxsize
        for criterion in self._limits:
            left = min(left, criterion.max_length - longest)
            warned = criterion.max_position_embeddings
            if warned is not None and longest <= warned:
                left = min(left, warned - longest)
        return left

    def ended_by(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Return whether each row ends by its last token, one of `tokens`: an end token, or the end of a stop text."""
        ended = list(map(self.end_tokens.__contains__, tokens))
        for stops in self._stops:
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                ended[index] = stops.has_stopped(row, token) or ended[index]
        return ended

    def ended(self, rows: Sequence[int], scores: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        """Return whether other criteria end each row, `bool [len(rows)]`; `scores` as `generate` passes them."""
        lengths = [self.table.lengths[row] for row in rows]
        if len(set(lengths)) == 1:
            if not self.needs_batch:
                return self._judge(self.table.left_padded(rows), scores)
            return self._judge(self.table.whole_batch(rows), scores)[self.table.index(rows)]
        ended = torch.empty(len(rows), dtype=torch.bool, device=self.table.device)
        for group in group_by(range(len(rows)) if self.needs_batch else lengths):
            ids = self.table.left_padded([rows[index] for index in group])
            indices = to_device(group, ended.device)  # a list would be copied while the host waits
            ended[indices] = self._judge(ids, scores)
        return ended

    def _judge(self, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self._others:
            result: object = criterion(ids, scores)
            if isinstance(result, bool):
                result = torch.full_like(ended, result)
            if not isinstance(result, torch.Tensor) or result.shape not in ((), ended.shape):
                got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(f"stopping_criteria must return one bool per row ({len(ids)}), got {got}")
            ended = ended | result.bool()
        return ended
