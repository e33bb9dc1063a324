"""Sampling for several calls at once: one operation per processor over the rows of all calls, whatever their settings.

It covers the processors and criteria of Transformers that most calls use, and returns the tokens that each call's
`Sampler` would sample by itself. Calls with any others sample by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_parallel.generation.log_probs import LogProbs, model_log_probs
from hf_parallel.generation.processors import MinLengthProcessor
from hf_parallel.generation.rng import RowRNG, check_drawn, draw, next_keys
from hf_parallel.generation.sampling import RowPenaltyProcessor, Sampled, Sampler
from hf_parallel.generation.warpers import is_plain, split_warpers
from hf_parallel.kernels import HostCopy, to_device
from hf_parallel.kernels.sampling import Warpers, can_race, can_sample, sample


@dataclass(frozen=True, eq=False)
class SamplingTask:
    """The next token of rows of one call, whose logits are `[len(rows), vocabulary]`; see `Sampler.sample`."""

    sampler: Sampler
    rows: Sequence[int]
    logits: torch.Tensor
    with_log_probs: bool

    def run(self) -> Sampled | BaseException:
        """Sample by itself."""
        try:
            return self.sampler.sample(self.rows, self.logits, self.with_log_probs)
        except BaseException as error:
            return error

    @property
    def can_join(self) -> bool:
        """Whether `sample_jointly` covers it."""
        sampler = self.sampler
        if sampler.do_sample and sampler.rngs is None:  # the calls share PyTorch's global generator
            return False
        longest = max(sampler.table.lengths[row] for row in self.rows) + 1
        for criterion in sampler.criteria:
            if type(criterion) is MaxLengthCriteria:
                if criterion.max_position_embeddings is not None and longest > criterion.max_position_embeddings:
                    return False  # it warns
            elif type(criterion) is not EosTokenCriteria:
                return False
        return _stages(sampler) is not None


def sample_jointly(tasks: Sequence[SamplingTask]) -> list[Sampled | BaseException]:
    """Sample the next tokens of several calls. Return for each what was sampled, or the error that it raised."""
    joint = [task for task in tasks if task.can_join]
    joint = [task for task in joint if task.logits.device == joint[0].logits.device]
    done: dict[SamplingTask, Sampled | BaseException] = {}
    if len(joint) > 1:
        try:
            done = dict(zip(joint, _Batch(joint).sample(), strict=True))
        except _CannotDrawError:
            done = {}  # each by itself, to find out which
        except Exception as error:  # generators may have advanced, so that no task can be repeated
            done = dict.fromkeys(joint, error)
    return [done[task] if task in done else task.run() for task in tasks]


class _CannotDrawError(Exception):
    """Raised before any generator has advanced: each task can sample by itself."""


def _stages(sampler: Sampler) -> list[tuple[int, Any]] | None:
    """Return a sampler's processors with the indices of their stages; None: one has no stage, or another order."""
    stages = [(_STAGE_OF.get(type(processor), -1), processor) for processor in sampler.processors]
    numbers = [number for number, _ in stages]
    ordered = all(a < b or a == b == 1 for a, b in zip(numbers, numbers[1:], strict=False))
    if not ordered or any(number < 0 or not _is_plain(processor) for number, processor in stages):
        return None
    return stages


def _is_plain(processor: Any) -> bool:
    """Whether a processor has no settings that its stage does not implement."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return processor.prompt_ignore_length is None
    if type(processor) in (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper):
        return is_plain(processor)
    return True


class _Batch:
    """The rows of several tasks."""

    def __init__(self, tasks: Sequence[SamplingTask]) -> None:
        self.tasks = tasks
        self.rows = [(task.sampler, row) for task in tasks for row in task.rows]
        ends = [0]
        for task in tasks:
            ends.append(ends[-1] + len(task.rows))
        self.parts = [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
        self.device = tasks[0].logits.device
        self.warpers: dict[Sampler, Warpers] = {}  # of the tasks that draw, if one operation applies them

    def sample(self) -> list[Sampled]:
        is_recorded = any(task.with_log_probs or task.sampler.logits is not None for task in self.tasks)
        one_operation = self._can_sample()
        try:
            logits = torch.cat([task.logits for task in self.tasks])
            scores = self._process(logits, is_recorded, one_operation)
        except Exception as error:  # such as out of memory, for all rows together
            raise _CannotDrawError from error
        sampled = [i for i, (sampler, _) in enumerate(self.rows) if sampler.do_sample]
        greedy = [i for i, (sampler, _) in enumerate(self.rows) if not sampler.do_sample]
        drawn = torch.zeros(2, len(self.rows), dtype=torch.int64, device=self.device)  # as `sample` returns it
        sampling = torch.empty(len(self.rows), device=self.device)
        if greedy:
            of, index = self._select(scores, greedy)
            drawn[0, index] = of.argmax(dim=-1)
        if sampled:
            of, index = self._select(scores, sampled)
            drawn[:, index], probs = self._draw(of, sampled, one_operation)
            sampling[index] = probs.log()
        log_probs = self._log_probs(logits, scores, drawn[0], sampling)
        host = HostCopy(drawn)
        return [
            self._finish(task, part, logits, scores, drawn[0], log_probs, host)
            for task, part in zip(self.tasks, self.parts, strict=True)
        ]

    def _log_probs(
        self, logits: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor, sampling: torch.Tensor
    ) -> LogProbs | None:
        """Return the log-probabilities of all rows if requested. Those of greedy rows are missing in `sampling`."""
        if not any(task.with_log_probs for task in self.tasks):
            return None
        if all(sampler.do_sample and not sampler.processors for sampler, _ in self.rows):
            return LogProbs(sampling, sampling)
        model, _ = model_log_probs(logits, tokens)
        for changes in (False, True):  # whether processors change the scores
            rows = [i for i, (s, _) in enumerate(self.rows) if not s.do_sample and bool(s.processors) is changes]
            if rows:
                of, index = self._select(scores if changes else model, rows)
                sampling[index] = model_log_probs(of, tokens[index])[0] if changes else of
        return LogProbs(model, sampling)

    def _can_sample(self) -> bool:
        """Whether one operation applies the warpers and draws; scores that are returned need each warper."""
        if not can_race(self.device):
            return False
        drawing = [task for task in self.tasks if task.sampler.do_sample]
        if any(task.sampler.scores is not None for task in self.tasks):
            return False
        if not all(task.sampler.has_own_rngs for task in drawing):
            return False
        self.warpers = {task.sampler: split_warpers(task.sampler.processors)[1] for task in drawing}
        return can_sample(self.device, self.warpers.values(), sum(len(task.rows) for task in drawing))

    def _draw(
        self, scores: torch.Tensor, indices: Sequence[int], one_operation: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token of some of the rows; see `sample`."""
        rngs = [self._rng(i) for i in indices]
        if one_operation:
            return sample(scores, [self.warpers[self.rows[i][0]] for i in indices], next_keys(rngs, self.device))
        try:
            probs = scores.softmax(dim=-1, dtype=torch.float32)
            best = probs.amax(dim=-1)
            can_draw = self.device.type != "cpu" or bool(((best > 0) & best.isfinite()).all())
        except Exception as error:
            raise _CannotDrawError from error
        if not can_draw:
            raise _CannotDrawError
        tokens = draw(probs, rngs)
        return torch.stack((tokens, torch.zeros_like(tokens))), probs.gather(1, tokens[:, None]).squeeze(1)

    def _rng(self, index: int) -> RowRNG:
        sampler, row = self.rows[index]
        assert sampler.rngs is not None, "see `can_join`"
        return sampler.rngs[row]

    @staticmethod
    def _finish(
        task: SamplingTask,
        part: slice,
        logits: torch.Tensor,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        log_probs: LogProbs | None,
        host: HostCopy,
    ) -> Sampled:
        """Append the tokens of one task, and record its scores."""
        sampler = task.sampler
        sampler.rows = task.rows
        sampler.record_scores(task.rows, logits[part], scores[part])
        sampler.append_drawn(task.rows, tokens[part])
        lengths = [sampler.table.lengths[row] for row in task.rows]
        limits = [c.max_length for c in sampler.criteria if isinstance(c, MaxLengthCriteria)]
        is_full = [any(length >= limit for limit in limits) for length in lengths]
        ends = sampler.end_tokens

        def read() -> tuple[list[int], list[bool]]:
            drawn, flags = host.values
            check_drawn(flags[part])
            return drawn[part], [token in ends or full for token, full in zip(drawn[part], is_full, strict=True)]

        own = None
        if log_probs is not None and task.with_log_probs:
            own = LogProbs(log_probs.model[part], log_probs.sampling[part])
            if sampler.top_log_probs:
                own = sampler.log_probs(logits[part], tokens[part], own.sampling)
        return Sampled(tokens[part], own, read)

    def _select(self, values: torch.Tensor, indices: list[int]) -> tuple[torch.Tensor, Any]:
        """Return some of the rows, and their index."""
        if len(indices) == len(values):
            return values, slice(None)
        index = to_device(indices, self.device)
        return values[index], index

    def _process(self, logits: torch.Tensor, copy: bool, one_operation: bool) -> torch.Tensor:
        """Apply the processors of all tasks, stage by stage, except the warpers that one operation applies.

        The scores are float32, or the logits if there are no stages left. Writes to `logits` unless `copy` is set.
        """
        stages: dict[int, list[tuple[int, Any]]] = {}
        for task, part in zip(self.tasks, self.parts, strict=True):
            for number, processor in _stages(task.sampler) or ():
                if not (one_operation and task.sampler.do_sample and number >= _WARPERS):
                    stages.setdefault(number, []).extend((i, processor) for i in range(part.start, part.stop))
        if not stages and one_operation:
            return logits
        scores = logits.to(torch.float32, copy=copy)
        for number in sorted(stages):
            indices, processors = [i for i, _ in stages[number]], [processor for _, processor in stages[number]]
            if number == 1:
                scores = self._suppress(scores, stages[number])
                continue
            of, index = self._select(scores, indices)
            processed = _STAGES[number](self, of, indices, processors)
            scores = processed if isinstance(index, slice) else scores.index_copy_(0, index, processed)
        return scores

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return to_device(values, self.device, torch.float32)[:, None]

    def _divide(self, scores: torch.Tensor, divisors: Sequence[float]) -> torch.Tensor:
        """Divide rows as PyTorch divides by a number: on CUDA it multiplies by the inverse."""
        column = self._column(divisors)
        return scores / column if scores.device.type == "cpu" else scores * column.reciprocal()

    # One function per stage: scores [n, vocabulary], indices of the rows, their processors

    def _penalize(self, scores: torch.Tensor, indices: Sequence[int], processors: Sequence[Any]) -> torch.Tensor:
        penalties, seen = [], []
        for index, processor in zip(indices, processors, strict=True):
            sampler, row = self.rows[index]
            begin = 0
            if isinstance(processor, RowPenaltyProcessor):
                begin, processor = processor.padding[row], processor.processor
            penalties.append(processor.penalty)
            seen.append(sampler.table.ids[row, begin : sampler.table.lengths[row]])
        longest = max(map(len, seen))
        # A row's first token fills it up, as a token is penalized once, however often it occurs.
        tokens = torch.stack([torch.cat((one, one[:1].expand(longest - len(one)))) for one in seen])
        padded = torch.nn.functional.pad(scores, (0, 1))  # for tokens outside the output vocabulary
        tokens = tokens.clamp(max=scores.shape[1])
        found = padded.gather(1, tokens)
        found = torch.where(found < 0, found * self._column(penalties), self._divide(found, penalties))
        return padded.scatter_(1, tokens, found)[:, :-1]

    def _suppress(self, scores: torch.Tensor, found: Sequence[tuple[int, MinLengthProcessor]]) -> torch.Tensor:
        pairs = [
            (i, token)
            for i, processor in found
            if self.rows[i][0].table.lengths[self.rows[i][1]] < processor.min_length
            for token in processor.eos_token_ids
            if 0 <= token < scores.shape[1]
        ]
        if not pairs:
            return scores
        rows, tokens = (to_device(numbers, self.device) for numbers in zip(*pairs, strict=True))
        scores[rows, tokens] = -torch.inf
        return scores

    def _scale(self, scores: torch.Tensor, indices: Sequence[int], processors: Sequence[Any]) -> torch.Tensor:
        return self._divide(scores, [processor.temperature for processor in processors])

    def _keep_top_k(self, scores: torch.Tensor, indices: Sequence[int], processors: Sequence[Any]) -> torch.Tensor:
        counts = [min(processor.top_k, scores.shape[1]) for processor in processors]
        highest = torch.topk(scores, max(counts))[0]
        last = highest.gather(1, to_device(counts, self.device)[:, None] - 1)
        return scores.masked_fill(scores < last, -torch.inf)

    def _keep_top_p(self, scores: torch.Tensor, indices: Sequence[int], processors: Sequence[Any]) -> torch.Tensor:
        ascending, order = torch.sort(scores, descending=False)
        cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
        removed = cumulative <= self._column([1 - processor.top_p for processor in processors])
        removed[..., -1:] = False
        return scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)

    def _keep_min_p(self, scores: torch.Tensor, indices: Sequence[int], processors: Sequence[Any]) -> torch.Tensor:
        probs = torch.softmax(scores, dim=-1)
        best = probs.amax(dim=-1, keepdim=True)
        removed = probs < self._column([processor.min_p for processor in processors]) * best
        removed.scatter_(-1, torch.topk(probs, 1, dim=-1).indices, False)
        return scores.masked_fill(removed, -torch.inf)


_Stage = Callable[[_Batch, torch.Tensor, Sequence[int], Sequence[Any]], torch.Tensor]
_STAGES: dict[int, _Stage] = {
    0: _Batch._penalize,
    2: _Batch._scale,
    3: _Batch._keep_top_k,
    4: _Batch._keep_top_p,
    5: _Batch._keep_min_p,
}
_STAGE_OF: dict[type, int] = {
    RepetitionPenaltyLogitsProcessor: 0,
    RowPenaltyProcessor: 0,
    MinLengthProcessor: 1,
    TemperatureLogitsWarper: 2,
    TopKLogitsWarper: 3,
    TopPLogitsWarper: 4,
    MinPLogitsWarper: 5,
}
"""Stages in the order in which `generate` applies the processors."""
_WARPERS = 2
"""First stage of the warpers."""
