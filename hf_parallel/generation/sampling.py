"""Sampler: from logits to tokens, with `generate`'s own processors and criteria over rows of unequal length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.log_probs import Drawn, LogProbs, TopLogProbs, model_log_probs
from hf_parallel.generation.processors import MinLengthProcessor, check_signature, is_stateful, needs_batch
from hf_parallel.generation.rng import Candidates, check_drawn, draw, draw_among_each, make_rngs, next_keys
from hf_parallel.generation.token_table import TokenTable
from hf_parallel.generation.warpers import split_warpers
from hf_parallel.kernels import HostCopy, to_device
from hf_parallel.kernels.sampling import Warpers, can_race, can_sample, sample


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sampled tokens `int64 [rows]` on the device, and their log-probabilities if requested.

    `read` returns tokens and whether rows have ended. It does not wait for work that was queued later.
    """

    tokens: torch.Tensor
    log_probs: LogProbs | None
    read: Callable[[], tuple[list[int], list[bool]]]


class Sampler:
    """Samples the next token of each active row and detects rows that have ended.

    Processors and criteria of Transformers receive the active rows only, in groups of equal length. Others may keep
    state per row. Unless their attribute `keeps_rows` is False, all processors (or criteria) receive the whole batch at
    every step, as under `generate`. But criteria then receive active rows of unequal length one at a time.
    `scores` and `logits`, lists of `[rows, vocabulary]`, are as `generate` returns them; None unless requested.
    """

    def __init__(
        self, call: GenerationCall, table: TokenTable, criteria: StoppingCriteriaList, seed: Any = None
    ) -> None:
        config = call.generation_config
        self.table, self.criteria = table, criteria
        self.do_sample = bool(config.do_sample)
        self.rngs = make_rngs(seed, self.num_rows)  # by row; None: PyTorch's global generator
        self.rows: Sequence[int] = ()  # being sampled, for processors that depend on them
        self.top_log_probs = [p for p in call.logits_processor if isinstance(p, TopLogProbs)]
        given = [p for p in call.logits_processor if not isinstance(p, TopLogProbs)]
        self.processors = [self._for_rows(MinLengthProcessor.convert(p)) for p in given]
        for processor in self.processors:
            check_signature(processor)
        self.is_stateful = any(is_stateful(helper) for helper in (*self.processors, *criteria))
        self._processors_need_batch = any(needs_batch(processor) for processor in self.processors)
        self._criteria_need_batch = any(needs_batch(criterion) for criterion in criteria)
        returned = config.return_dict_in_generate
        self.returns_log_probs = bool(returned or self.top_log_probs)
        self.scores: list[torch.Tensor] | None = [] if returned and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if returned and config.output_logits else None
        self.drawn: list[Drawn] = []  # sampled tokens with log-probabilities
        self._draws: dict[int, int] = {}  # number of tokens sampled, by row

    @property
    def stays_on_device(self) -> bool:
        """Whether sampling runs no code from outside Transformers, which might read tokens on the host."""
        return not (self._processors_need_batch or self._criteria_need_batch)

    @property
    def is_order_independent(self) -> bool:
        """Whether a row's tokens do not depend on the order in which the tokens of several rows are sampled."""
        return not self.is_stateful and (not self.do_sample or self.has_own_rngs or self.num_rows == 1)

    @property
    def has_own_rngs(self) -> bool:
        """Whether each row has an RNG of its own."""
        return self.rngs is not None and all(rng.is_own for rng in self.rngs)

    @property
    def num_rows(self) -> int:
        """Number of rows in the table."""
        return len(self.table.lengths)

    def fork(self, row: int, count: int) -> list[int]:
        """Append `count` copies of a row, with RNGs derived from the row's; return their indices."""
        if self.rngs is not None:
            self.rngs += self.rngs[row].fork(count)
        new = self.table.fork(row, count)
        for processor in self.processors:
            if isinstance(processor, RowPenaltyProcessor):
                processor.padding += [processor.padding[row]] * count
        self._draws |= dict.fromkeys(new, self._draws.get(row, 0))
        return new

    def add_row(self, length: int, draws: int) -> int:
        """Append a copy of the last row, cut to `length` tokens. It has its own RNG; its `scores` begin at `draws`."""
        (row,) = self.fork(self.num_rows - 1, 1)
        self.table.truncate(row, length)
        self._draws[row] = draws
        return row

    def sample(self, rows: Sequence[int], logits: torch.Tensor, with_log_probs: bool) -> Sampled:
        """Sample one token for each row, given their logits `[len(rows), vocabulary]`, and append it to the table."""
        device = self.table.ids.device
        may_fuse = self.do_sample and self.scores is None and can_race(device)
        if may_fuse and (self.rngs is None or all(self.rngs[row].is_own for row in rows)):
            head, warpers = split_warpers(self.processors)
            if can_sample(device, [warpers], len(rows)):
                return self._sample_from_scores(rows, logits, head, warpers, with_log_probs)
        if self.do_sample or self.processors or self.scores is not None:
            distribution = self.distribution(rows, logits)
        else:  # without a copy
            distribution = logits.to(device)
            self._record(self.logits, rows, logits)
        tokens, ended = self.draw(rows, distribution)
        log_probs, sampling = None, None
        if with_log_probs:
            if self.do_sample:
                sampling = distribution.gather(1, tokens[:, None]).squeeze(1).log()
            elif self.processors:
                sampling, _ = model_log_probs(distribution, tokens)
            log_probs = self.log_probs(logits, tokens, sampling)
        return Sampled(tokens, log_probs, partial(self.read, self.fetch(tokens, ended)))

    def _sample_from_scores(
        self, rows: Sequence[int], logits: torch.Tensor, head: Sequence[Any], warpers: Warpers, with_log_probs: bool
    ) -> Sampled:
        """Apply the processors before the last warpers; one operation applies these and draws."""
        self.rows = rows
        scores = self._process(rows, self._copy(logits), head) if head else logits.to(self.table.ids.device)
        self._record(self.logits, rows, logits)
        keys = None if self.rngs is None else next_keys([self.rngs[row] for row in rows], scores.device)
        drawn, probs = sample(scores, warpers, keys)
        self.append_drawn(rows, drawn[0])
        drawn[1] += self.ended(rows)
        log_probs = self.log_probs(logits, drawn[0], probs.log()) if with_log_probs else None
        return Sampled(drawn[0], log_probs, partial(self.read, HostCopy(drawn)))

    def distribution(self, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return probabilities `float32 [len(rows), vocabulary]`, or scores under greedy decoding, from logits of rows
        in ascending order."""
        self.rows = rows
        scores = self._process(rows, self._copy(logits))
        self.record_scores(rows, logits, scores)
        return scores.softmax(dim=-1, dtype=torch.float32) if self.do_sample else scores

    def distribution_ahead(self, logits: torch.Tensor, length: int) -> torch.Tensor:
        """Return the probabilities `[vocabulary]` for a row of `length` tokens, given logits `[vocabulary]`.
        Requires processors that do not depend on the tokens. Thread-safe."""
        ids = self.table.ids.new_zeros(1, 1).expand(1, length)
        return self._apply(ids, self._copy(logits[None]), self.processors)[0].softmax(dim=-1, dtype=torch.float32)

    def draw(
        self, rows: Sequence[int], distribution: torch.Tensor | Sequence[Candidates]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token for each row and append it to the table; `Candidates` if rows have RNGs of their own.

        Return tokens `int64 [len(rows)]` and whether rows have ended, `bool [len(rows)]`, on the device; see `fetch`.
        """
        if not isinstance(distribution, torch.Tensor):
            assert self.rngs is not None, "rows have RNGs of their own"
            tokens = draw_among_each(distribution, [self.rngs[row] for row in rows])
        elif not self.do_sample:
            tokens = distribution.argmax(dim=-1)
        elif self.rngs is None:
            tokens = torch.multinomial(distribution, num_samples=1).squeeze(1)
        else:
            tokens = draw(distribution, [self.rngs[row] for row in rows])
        self.append_drawn(rows, tokens)
        return tokens, self.ended(rows)

    def append_drawn(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Append one token `int64 [len(rows)]` to each row, for which its RNG has advanced."""
        self.table.append(rows, tokens)
        self._count(rows)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a row."""
        ends = [c.eos_token_id.flatten().tolist() for c in self.criteria if isinstance(c, EosTokenCriteria)]
        return frozenset(token for tokens in ends for token in tokens)

    def log_probs(self, logits: torch.Tensor, tokens: torch.Tensor, sampling: torch.Tensor | None = None) -> LogProbs:
        """Return the log-probabilities of tokens int64 `[n]`, given unprocessed logits `[n, vocabulary]`.

        `sampling` is that of `LogProbs`; None: it equals `LogProbs.model`.
        """
        top = max((one.top for one in self.top_log_probs), default=0)
        if sampling is not None and not self.processors and not top:
            return LogProbs(sampling, sampling)
        model, most = model_log_probs(logits, tokens, top)
        return LogProbs(model, model if sampling is None else sampling, most)

    def add_drawn(self, rows: list[int], output_rows: list[int], log_probs: LogProbs) -> None:
        """Keep the log-probabilities of the last token of each row; `output_rows` are the numbers for streamers."""
        columns = [self.table.lengths[row] - 1 for row in rows]
        self.drawn.append(Drawn(rows, columns, [self._draws.get(row, 1) - 1 for row in rows], log_probs))
        for collector in self.top_log_probs:
            collector.add(output_rows, log_probs)

    @staticmethod
    def fetch(tokens: torch.Tensor, ended: torch.Tensor) -> HostCopy:
        """Start to copy sampled tokens to the host; `read` does not wait for work that is queued later."""
        return HostCopy(torch.stack((tokens, ended.to(tokens.dtype))))

    @staticmethod
    def read(fetched: HostCopy) -> tuple[list[int], list[bool]]:
        """Return tokens and ended flags. The only point at which a decode step waits for the device.

        Raises
        ------
        RuntimeError
            If `sample` has marked a row.
        """
        tokens, flags = fetched.tolist()
        check_drawn(flags)
        return tokens, [flag != 0 for flag in flags]

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Append one given token to each row, and advance its RNG as if the token had been sampled."""
        if self.rngs is not None and self.do_sample:
            for row in rows:
                self.rngs[row].skip()
        self.append_drawn(rows, to_device(tokens, self.table.ids.device))

    def _for_rows(self, processor: Any) -> Any:
        padding = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is not RepetitionPenaltyLogitsProcessor or not isinstance(padding, torch.Tensor):
            return processor
        of_rows = torch.arange(self.num_rows) * len(padding) // self.num_rows  # row of the call with the same prompt
        return RowPenaltyProcessor(processor, padding.cpu()[of_rows].tolist(), self)

    def _copy(self, logits: torch.Tensor) -> torch.Tensor:  # as processors may write to their input
        return logits.to(copy=True, dtype=torch.float32, device=self.table.ids.device)

    def _process(
        self, rows: Sequence[int], logits: torch.Tensor, processors: Sequence[Any] | None = None
    ) -> torch.Tensor:
        processors = self.processors if processors is None else processors
        if not processors:
            return logits
        if not self._processors_need_batch:
            lengths = [self.table.lengths[row] for row in rows]
            if lengths.count(lengths[0]) == len(lengths):
                return self._apply(self.table.left_padded(rows), logits, processors)
            out = torch.empty_like(logits)
            for same in _groups(lengths):
                self.rows, index = [rows[i] for i in same], to_device(same, out.device)
                out[index] = self._apply(self.table.left_padded(self.rows), logits[index], processors).to(out.dtype)
            self.rows = rows
            return out
        if len(rows) == self.num_rows:
            return self._apply(self.table.left_padded(rows), logits, processors)
        index = self.table.index(rows)
        batch = logits.new_zeros(self.num_rows, logits.shape[-1])
        batch[index] = logits
        return self._apply(self._whole_batch(rows), batch, processors)[index]

    def _whole_batch(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the whole batch, padded on the right if `rows` are the longest of it, else on the left."""
        longest = max(self.table.lengths)
        if all(self.table.lengths[row] == longest for row in rows):
            return self.table.ids[:, :longest]
        return self.table.left_padded(range(self.num_rows))

    @staticmethod
    def _apply(ids: Any, scores: Any, processors: Sequence[Any]) -> torch.Tensor:
        processed = scores
        for processor in processors:  # `LogitsProcessorList` would inspect each signature at every step
            processed = processor(ids, processed)
        if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
            got = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
            raise ValueError(f"a logits_processor must return scores of the shape {list(scores.shape)}, got {got}")
        return processed

    def ended(self, rows: Sequence[int]) -> torch.Tensor:
        """Return whether the criteria end each row, `bool [len(rows)]`."""
        scores = None if self.scores is None else tuple(self.scores)  # as `generate` passes them
        lengths = [self.table.lengths[row] for row in rows]
        if len(set(lengths)) == 1:
            if not self._criteria_need_batch:
                return self._judge(self.table.left_padded(rows), scores)
            return self._judge(self._whole_batch(rows), scores)[self.table.index(rows)]
        ended = torch.empty(len(rows), dtype=torch.bool, device=self.table.ids.device)
        for same in _groups(range(len(rows)) if self._criteria_need_batch else lengths):
            index = to_device(same, ended.device)  # a list would be copied while the host waits
            ended[index] = self._judge(self.table.left_padded([rows[i] for i in same]), scores)
        return ended

    def _judge(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            result: Any = criterion(ids, scores)
            if isinstance(result, bool):
                result = torch.full_like(ended, result)
            if not isinstance(result, torch.Tensor) or result.shape not in ((), ended.shape):
                got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(f"stopping_criteria must return one bool per row ({len(ids)}), got {got}")
            ended = ended | result.bool()
        return ended

    def record_scores(self, rows: Sequence[int], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Record logits and scores `[len(rows), vocabulary]` of the next tokens of rows, if requested."""
        self._record(self.logits, rows, logits)
        self._record(self.scores, rows, scores)

    def _record(self, record: list[torch.Tensor] | None, rows: Sequence[int], values: torch.Tensor) -> None:
        """Store values `[rows, vocabulary]` at index n for rows of n new tokens; rows without a value hold zeros."""
        if record is None:
            return
        draws, values = [self._draws.get(row, 0) for row in rows], values.to(self.table.ids.device)
        for step in sorted(set(draws)):
            while len(record) <= step:
                record.append(values.new_zeros((self.num_rows, values.shape[-1]), dtype=torch.float32))
            if missing := self.num_rows - len(record[step]):
                record[step] = torch.cat((record[step], record[step].new_zeros(missing, values.shape[-1])))
            same = [i for i, other in enumerate(draws) if other == step]
            if len(same) == len(rows):
                record[step][self.table.index(rows)] = values.float()
            else:
                of_rows, index = (to_device(numbers, values.device) for numbers in ([rows[i] for i in same], same))
                record[step][of_rows] = values[index].float()

    def _count(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._draws[row] = self._draws.get(row, 0) + 1


class RowPenaltyProcessor(LogitsProcessor):
    """Repetition penalty that ignores each row's padding and can be applied to a subset of the rows.

    Padding is replaced by the row's last token, which is penalized once, however often it occurs.
    """

    keeps_rows = False

    def __init__(self, processor: RepetitionPenaltyLogitsProcessor, padding: list[int], sampler: Sampler) -> None:
        self.processor, self.padding, self.sampler = copy.copy(processor), padding, sampler
        self.processor.prompt_ignore_length = None
        self._ends: tuple[list[int], torch.Tensor] = ([], torch.empty(0))  # on the device while they are unchanged

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, lengths = self.sampler.rows, self.sampler.table.lengths
        rows = rows if len(rows) == len(scores) else range(len(scores))
        padding = [self.padding[row] + max(0, input_ids.shape[1] - lengths[row]) for row in rows]
        if any(padding):
            if padding != self._ends[0]:
                self._ends = padding, to_device(padding, input_ids.device)[:, None]
            is_padding = torch.arange(input_ids.shape[1], device=input_ids.device) < self._ends[1]
            input_ids = torch.where(is_padding, input_ids[:, -1:], input_ids)
        return self.processor(input_ids, scores)


def _groups(keys: Iterable[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())
