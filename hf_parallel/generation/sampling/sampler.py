"""Sampler: from logits to tokens, with `generate`'s own processors and criteria over rows of unequal length.

Rows of several calls are sampled at once, whatever their settings, and get the tokens that each would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_parallel.generation.sampling.log_probs import (
    Drawn,
    InheritedTokens,
    LogProbs,
    TopLogProbs,
    model_log_probs,
    spread,
)
from hf_parallel.generation.sampling.parts import Part, join
from hf_parallel.generation.sampling.processors import is_stateful
from hf_parallel.generation.sampling.rng import (
    Candidates,
    CannotDrawError,
    RowRNG,
    Seed,
    draw,
    draw_among_each,
    make_rngs,
    next_keys,
    take_back,
)
from hf_parallel.generation.sampling.row_processors import CallRows, JointProcessors, RowCriteria, RowProcessors
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.kernels import HostCopy, to_device
from hf_parallel.kernels.sampling import Warpers, can_race, can_sample, multinomial, sample, softmax


class DrawnTokens(NamedTuple):
    """Tokens of all rows of a batch on their way to the host: `[rows]`, or with marks of the rows `[2, rows]`."""

    copy: HostCopy
    has_marks: bool
    """Whether there are rows that have ended or cannot be drawn; for the marks see `kernels.sampling.sample`."""

    @classmethod
    def of(cls, tokens: torch.Tensor, marks: torch.Tensor | None) -> DrawnTokens:
        """Start to copy tokens, and marks if there are any, int64 `[rows]` each."""
        if marks is None:
            return cls(HostCopy(tokens), False)
        return cls(HostCopy(torch.stack((tokens, marks))), True)

    def read(self) -> tuple[list[int], list[int] | None]:
        """Return the tokens and the marks; None: there are none. Waits for the copy."""
        values = self.copy.values
        return (values[0], values[1]) if self.has_marks else (values, None)


class Sampled:
    """Sampled tokens of a call: `tokens`, a part of `int64 [rows of all calls]` on the device; and `log_probs`."""

    __slots__ = ("_criteria", "_drawn", "_full", "_rows", "log_probs", "tokens")

    def __init__(
        self,
        tokens: Part,
        log_probs: LogProbs | None,
        drawn: DrawnTokens,  # of all calls
        criteria: RowCriteria,
        rows: Sequence[int],  # that the tokens belong to
        full: Sequence[int] = (),  # indices of those that have the maximum length
    ) -> None:
        self.tokens = tokens
        self.log_probs = log_probs
        self._drawn = drawn
        self._criteria = criteria
        self._rows = rows
        self._full = full

    def read(self) -> tuple[list[int], list[bool]]:
        """Return tokens, and whether rows have ended. Waits for the device, but not for work that was queued later.

        Raises `RuntimeError` if a row cannot be drawn.
        """
        every_token, every_mark = self._drawn.read()
        part = self.tokens.rows
        tokens = every_token[part]
        ended = self._criteria.ended_by(self._rows, tokens)
        if every_mark is not None:
            marks = every_mark[part]
            invalid = [row for row, mark in enumerate(marks) if mark >= 2]
            if invalid:
                raise cannot_draw(invalid)
            ended = [end or mark != 0 for end, mark in zip(ended, marks, strict=True)]
        for index in self._full:
            ended[index] = True
        return tokens, ended


def cannot_draw(rows: Sequence[int]) -> RuntimeError:
    """Return the error of a call whose rows cannot be drawn."""
    return RuntimeError(f"cannot draw: the probabilities of rows {list(rows)} are not finite, or all are zero")


NextTokens = torch.Tensor | Sampled
"""The next token of each row: logits `[rows, vocabulary]` of which it will be sampled, or what was sampled."""


class Sampler:
    """Samples the next token of each active row and detects rows that have ended.

    Processors and criteria of Transformers receive the active rows only. Those of the caller may keep state per row:
    unless their attribute `keeps_rows` is False, they receive the whole batch at every step, as under `generate`. But
    criteria then receive active rows of unequal length one at a time. `rows` are indices in the table.
    `scores` and `logits`, lists of `[rows, vocabulary]`, are as `generate` returns them; None unless requested.
    """

    def __init__(
        self,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        table: TokenTable,
        seed: Seed = None,
    ) -> None:
        self.table = table
        self.criteria = criteria
        self.row_criteria = RowCriteria(criteria, table)
        self.do_sample = bool(config.do_sample)
        self.rngs = make_rngs(seed, self.num_rows)  # by row; None: PyTorch's global generator
        self.top_log_probs = [processor for processor in processors if isinstance(processor, TopLogProbs)]
        applied = [processor for processor in processors if not isinstance(processor, TopLogProbs)]
        self.processors = RowProcessors(applied, table)
        self.is_stateful = self.processors.is_stateful or any(map(is_stateful, criteria))
        returned = config.return_dict_in_generate
        self.returns_log_probs = bool(returned or self.top_log_probs)
        self.scores: list[torch.Tensor] | None = [] if returned and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if returned and config.output_logits else None
        self.records_scores = self.scores is not None or self.logits is not None
        self.drawn: list[Drawn] = []  # sampled tokens with log-probabilities
        self.forks: dict[int, InheritedTokens] = {}  # by row, parents before their forks
        self._draws = [0] * self.num_rows  # number of tokens sampled, by row

    @property
    def stays_on_device(self) -> bool:
        """Whether sampling runs no code from outside Transformers, which might read tokens on the host."""
        return not (self.processors.needs_batch or self.row_criteria.needs_batch)

    @property
    def is_order_independent(self) -> bool:
        """Whether a row's tokens do not depend on the order in which the tokens of several rows are sampled."""
        if self.is_stateful:
            return False
        return not self.do_sample or self.rngs is not None or self.num_rows == 1

    @property
    def num_rows(self) -> int:
        """Number of rows in the table."""
        return len(self.table.lengths)

    def fork(self, row: int, count: int) -> list[int]:
        """Append `count` copies of a row, with RNGs derived from the row's; return their indices."""
        if self.rngs is not None:
            self.rngs += self.rngs[row].fork(count)
        self.processors.fork(row, count)
        rows = self.table.fork(row, count)
        inherited = InheritedTokens(row, self.table.lengths[row], self._draws[row])
        self.forks.update(dict.fromkeys(rows, inherited))
        self._draws += [self._draws[row]] * count
        return rows

    def log_probs_of_rows(self, by_draw: bool = False) -> torch.Tensor:
        """Return the log-probabilities of the tokens of all rows so far; see `spread`."""
        return spread(self.drawn, self.num_rows, self.forks, by_draw)

    def of_rows(self, kept: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
        """Return `scores` or `logits` of rows, `[len(rows), vocabulary]` per step, with those that rows inherited."""
        of_rows = []
        for step, values in enumerate(kept):
            drawers = [self._drawer(row, step) for row in rows]
            missing = max(drawers) + 1 - len(values)  # rows that began later, and were never at this step
            if missing > 0:
                values = F.pad(values, (0, 0, 0, missing))  # noqa: PLW2901
            of_rows.append(values[drawers])
        return of_rows

    def _drawer(self, row: int, step: int) -> int:
        """Return the row that sampled a token of a row: itself, or one that it continues."""
        fork = self.forks.get(row)
        while fork is not None and step < fork.draws:
            row = fork.parent
            fork = self.forks.get(row)
        return row

    def distribution(self, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return probabilities `float32 [len(rows), vocabulary]`, or scores under greedy decoding, from logits of rows
        in ascending order."""
        scores = JointProcessors([CallRows(self.processors, rows)])(logits.to(self.table.device))
        self.record_scores(rows, logits, scores)
        return softmax(scores) if self.do_sample else scores

    def distribution_ahead(self, logits: torch.Tensor, length: int) -> torch.Tensor:
        """Return the probabilities `[vocabulary]` for a row of `length` tokens, given logits `[vocabulary]`.
        Requires processors that do not depend on the tokens. Thread-safe."""
        scores = logits[None].to(copy=True, dtype=torch.float32, device=self.table.device)
        return softmax(self.processors.ahead(scores, length))[0]

    def draw(self, rows: Sequence[int], distribution: torch.Tensor | Sequence[Candidates]) -> Sampled:
        """Sample one token for each row and append it to the table; `Candidates` if rows have RNGs."""
        if not isinstance(distribution, torch.Tensor):
            tokens = draw_among_each(distribution, self.rngs_of(rows))
        elif not self.do_sample:
            tokens = distribution.argmax(dim=-1)
        else:
            tokens = _draw_tokens(distribution, [] if self.rngs is None else self.rngs_of(rows))
        return self._finish(rows, tokens)

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> Sampled:
        """Append one given token to each row, and advance its RNG as if the token had been sampled."""
        if self.rngs is not None and self.do_sample:
            for row in rows:
                self.rngs[row].skip()
        return self._finish(rows, to_device(tokens, self.table.device))

    def log_probs(self, logits: torch.Tensor, tokens: torch.Tensor, sampling: torch.Tensor | None = None) -> LogProbs:
        """Return the log-probabilities of tokens int64 `[n]`, given unprocessed logits `[n, vocabulary]`.

        `sampling` is that of `LogProbs`; None: it equals `LogProbs.model`.
        """
        top = max([collector.top for collector in self.top_log_probs], default=0)
        if sampling is not None and not self.processors and not top:
            return LogProbs(sampling, sampling)
        labels = self.top_log_probs[0].labels if top else ()
        model, most = model_log_probs(logits, tokens, top, labels)
        if sampling is None:
            sampling = model
        return LogProbs(model, sampling, most)

    def add_drawn(
        self, rows: Sequence[int], output_rows: Sequence[int], log_probs: LogProbs, num_steps: int = 1
    ) -> None:
        """Keep the log-probabilities of the last tokens of rows, `[num_steps, len(rows)]` in one dimension.

        `output_rows` are the numbers for streamers.
        """
        steps_left = range(num_steps, 0, -1)
        lengths = [self.table.lengths[row] for row in rows]
        num_draws = [self._draws[row] for row in rows]
        columns = [length - left for left in steps_left for length in lengths]
        draws = [count - left for left in steps_left for count in num_draws]
        every_row = tuple(rows) * num_steps
        self.drawn.append(Drawn(every_row, tuple(columns), tuple(draws), log_probs))
        for collector in self.top_log_probs:
            collector.add(output_rows, log_probs)

    @cached_property
    def can_join(self) -> bool:
        """Whether it can sample together with other calls: row by row, and without a generator that they share."""
        has_rngs = self.rngs is not None or not self.do_sample
        return has_rngs and self.row_criteria.is_row_wise and self.processors.is_row_wise

    @property
    def can_stand(self) -> bool:
        """Whether rows end by their own tokens, and nothing but tokens and log-probabilities is kept of a step."""
        return self.row_criteria.is_row_wise and not self.top_log_probs and not self.records_scores

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the next draw, or the end of a row, depends on the tokens in the table."""
        return self.processors.reads_tokens or self.row_criteria.has_stops

    def rngs_of(self, rows: Sequence[int]) -> list[RowRNG]:
        """Return the RNGs of rows, which are not PyTorch's global generator."""
        assert self.rngs is not None, "rows have RNGs"
        return [self.rngs[row] for row in rows]

    def _finish(self, rows: Sequence[int], tokens: torch.Tensor) -> Sampled:
        """Append tokens that rows have drawn."""
        ended, full = self.append_drawn(rows, Part(tokens))
        return Sampled(Part(tokens), None, DrawnTokens.of(tokens, ended), self.row_criteria, rows, full)

    def count_draws(self, rows: Sequence[int], count: int) -> None:
        """Count tokens that each row has drawn, and which the table has."""
        for row in rows:
            self._draws[row] += count

    def append_drawn(self, rows: Sequence[int], tokens: Part) -> tuple[torch.Tensor | None, Sequence[int]]:
        """Append one token `int64 [len(rows)]` to each row, for which its RNG has advanced.

        Return whether criteria that are not row-wise end each row, `int64 [len(rows)]`, or None if there are none; and
        the indices of rows that have the maximum length.
        """
        self.table.append(rows, tokens)
        self.count_draws(rows, 1)
        full = self.row_criteria.full(rows)
        if self.row_criteria.is_row_wise:
            return None, full
        scores = self.scores
        if scores is not None and self.forks:
            scores = self.of_rows(scores, range(self.num_rows))
        return self.row_criteria.ended(rows, None if scores is None else tuple(scores)).long(), full

    def record_scores(self, rows: Sequence[int], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Record logits and scores `[len(rows), vocabulary]` of the next tokens of rows, if requested."""
        if self.logits is not None:
            self._record(self.logits, rows, logits)
        if self.scores is not None:
            self._record(self.scores, rows, scores)

    def _record(self, record: list[torch.Tensor], rows: Sequence[int], values: torch.Tensor) -> None:
        """Store values `[rows, vocabulary]` at index n for rows of n new tokens; rows without a value hold zeros."""
        draws = [self._draws[row] for row in rows]
        values = values.to(self.table.device)
        vocabulary = values.shape[-1]
        for step in sorted(set(draws)):
            while len(record) <= step:
                record.append(values.new_zeros((self.num_rows, vocabulary), dtype=torch.float32))
            missing = self.num_rows - len(record[step])
            if missing:
                padding = record[step].new_zeros(missing, vocabulary)
                record[step] = torch.cat((record[step], padding))
            at_step = [index for index, draw in enumerate(draws) if draw == step]
            if len(at_step) == len(rows):
                record[step][self.table.index(rows)] = values.float()
            else:
                rows_at_step = to_device([rows[index] for index in at_step], values.device)
                record[step][rows_at_step] = values[to_device(at_step, values.device)].float()


class SamplingTask(NamedTuple):
    """Rows of one call that need their next token, as indices in the sampler's table."""

    sampler: Sampler
    rows: Sequence[int]


def sample_together(tasks: Sequence[SamplingTask], logits: Sequence[Part]) -> list[Sampled | BaseException]:
    """Sample the next tokens of several calls, given the logits of each, `[rows of the task, vocabulary]`.

    Return for each what was sampled, or the error that it raised.
    """
    joint = [index for index, task in enumerate(tasks) if task.sampler.can_join]
    done: dict[int, Sampled | BaseException] = {}
    if len(joint) > 1:
        try:
            batch = SamplingBatch([tasks[index] for index in joint])
            done.update(zip(joint, batch.sample([logits[index] for index in joint]), strict=True))
        except CannotDrawError:  # no generator has advanced: each by itself, to find out which
            pass
        except Exception as error:  # generators may have advanced, so that no task can be repeated
            done = dict.fromkeys(joint, error)
    for index, task in enumerate(tasks):
        if index not in done:
            try:
                (done[index],) = SamplingBatch([task]).sample([logits[index]])
            except BaseException as error:
                done[index] = error
    return [done[index] for index in range(len(tasks))]


class Draws(NamedTuple):
    """What the rows of a batch have drawn, from logits and scores `[rows, vocabulary]`."""

    logits: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    """int64 `[rows]`."""
    marks: torch.Tensor | None
    """int64 `[rows]` of rows that cannot be drawn, see `kernels.sampling.sample`; None: there are none."""
    probs: torch.Tensor | None
    """Probabilities of the tokens, float32 `[rows]`, NaN for greedy rows; None: all are greedy."""


class SamplingBatch:
    """The rows of one call, or of several whose samplers are `can_join`, which it can sample step after step."""

    def __init__(self, tasks: Sequence[SamplingTask]) -> None:
        self.tasks = tasks
        self.device = tasks[0].sampler.table.device
        self.parts: list[slice] = []
        """The rows of each task."""
        self.num_rows = 0
        for task in tasks:
            self.parts.append(slice(self.num_rows, self.num_rows + len(task.rows)))
            self.num_rows += len(task.rows)
        self._drawing = [task for task in tasks if task.sampler.do_sample]
        self._is_mixed = 0 < len(self._drawing) < len(tasks)

    def sample(self, logits: Sequence[Part]) -> list[Sampled]:
        """Sample and append one token for each row, given the logits of each task."""
        draws = self.draw(logits)
        return self._finish(draws, self._log_probs(draws))

    def draw(self, logits: Sequence[Part]) -> Draws:
        """Sample one token for each row, and advance its RNG; see `sample`."""
        try:
            joined = join(logits).to(self.device)
            scores = self._processors(joined)
            drawn_from = scores[self._drawing_rows] if self._is_mixed else scores
            if self._drawing and not self._fuses:
                drawn_from = softmax(drawn_from)
        except Exception as error:  # such as out of memory, for all rows together
            if len(self.tasks) == 1:
                raise
            raise CannotDrawError from error
        if self._drawing and not self._is_mixed:
            return Draws(joined, scores, *self._draw(drawn_from))
        tokens = scores.argmax(dim=-1)
        marks: torch.Tensor | None = None
        probs: torch.Tensor | None = None
        if self._is_mixed:
            index = self._drawing_rows
            tokens[index], some_marks, some_probs = self._draw(drawn_from)
            probs = torch.full_like(tokens, torch.nan, dtype=torch.float32).index_copy_(0, index, some_probs)
            if some_marks is not None:
                marks = torch.zeros_like(tokens).index_copy_(0, index, some_marks)
        return Draws(joined, scores, tokens, marks, probs)

    def known(self, draws: Draws) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return log-probabilities of the tokens, float32 `[rows]` each: `LogProbs.model` and `.sampling`.

        Those of some rows may be missing, or wrong, if their calls do not request them; None: no call does.
        """
        if not self._is_requested:
            return None
        sampling = self._sampling_log_probs(draws)
        if len(self.tasks) == 1:
            alone = self.tasks[0].sampler.log_probs(draws.logits, draws.tokens, sampling)
            return alone.model, alone.sampling
        model, _ = model_log_probs(draws.logits, draws.tokens)
        if sampling is None:
            return model, model
        return model, torch.where(sampling.isnan(), model, sampling)

    @cached_property
    def _fuses(self) -> bool:
        """Whether one operation applies the last warpers and draws. Scores that are returned need each warper."""
        drawing = self._drawing
        if not drawing or any(task.sampler.scores is not None for task in drawing):
            return False
        if not can_race(self.device):
            if self._is_requested:  # a trainer computes the log-probabilities of scores, not of probabilities
                return False
            if not all(task.sampler.processors.is_row_wise for task in drawing):  # others may return half precision
                return False
        warpers = []
        num_rows = 0
        for task in drawing:
            _, of_task = task.sampler.processors.fused
            warpers.append(of_task)
            num_rows += len(task.rows)
        is_seeded = all(task.sampler.rngs is not None for task in drawing)
        return can_sample(self.device, warpers, num_rows, is_seeded)

    @cached_property
    def _processors(self) -> JointProcessors:
        calls: list[CallRows] = []
        for task in self.tasks:
            is_fused = self._fuses and task.sampler.do_sample
            calls.append(CallRows(task.sampler.processors, task.rows, is_fused))
        return JointProcessors(calls)

    @cached_property
    def _drawing_rows(self) -> torch.Tensor:
        return self._index([task.sampler.do_sample for task in self.tasks])

    @cached_property
    def _is_requested(self) -> bool:
        """Whether a call requests log-probabilities."""
        return any(task.sampler.returns_log_probs for task in self.tasks)

    @cached_property
    def _rngs(self) -> list[RowRNG]:
        """The RNGs of rows that draw; empty: PyTorch's global generator."""
        rngs: list[RowRNG] = []
        for task in self._drawing:
            if task.sampler.rngs is not None:
                rngs += task.sampler.rngs_of(task.rows)
        return rngs

    @cached_property
    def _warpers(self) -> Warpers | list[Warpers]:
        """The settings of all rows that draw, or of each."""
        warpers: list[Warpers] = []
        for task in self._drawing:
            warpers += [task.sampler.processors.fused[1]] * len(task.rows)
        are_equal = warpers.count(warpers[0]) == len(warpers)
        return warpers[0] if are_equal else warpers

    def _draw(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Draw a token for each row of `values`: scores if one operation applies the warpers, else probabilities.

        Return tokens, marks of rows that cannot be drawn, and the tokens' probabilities; see `kernels.sampling.sample`.
        """
        if self._fuses:
            keys = next_keys(self._rngs, self.device) if self._rngs else None
            tokens, marks, probs = sample(values, self._warpers, keys)
            if marks is not None and not can_race(self.device):  # known on the host, and no generator has advanced
                take_back(self._rngs)
                raise CannotDrawError(str(cannot_draw(marks.nonzero().flatten().tolist())))
            return tokens, marks, probs
        tokens = _draw_tokens(values, self._rngs)
        return tokens, None, values.gather(1, tokens[:, None]).squeeze(1)

    @cached_property
    def _processed_greedy_rows(self) -> torch.Tensor | None:
        """The rows whose greedy tokens were chosen from processed scores, if there are any."""
        flags = [not task.sampler.do_sample and bool(task.sampler.processors) for task in self.tasks]
        return self._index(flags) if True in flags else None

    def _sampling_log_probs(self, draws: Draws) -> torch.Tensor | None:
        """Return `LogProbs.sampling`; NaN, or None for all rows, where it equals `LogProbs.model`."""
        if not self._fuses:
            if not any(task.sampler.processors for task in self.tasks):
                return None
            return model_log_probs(draws.scores, draws.tokens)[0]  # a trainer computes the same bits
        sampling = None if draws.probs is None else draws.probs.log()
        index = self._processed_greedy_rows
        if index is not None:
            if sampling is None:
                sampling = torch.full_like(draws.tokens, torch.nan, dtype=torch.float32)
            sampling[index], _ = model_log_probs(draws.scores[index], draws.tokens[index])
        return sampling

    def _log_probs(self, draws: Draws) -> list[LogProbs | None]:
        """Return the log-probabilities of each task that requests them."""
        if not self._is_requested:
            return [None] * len(self.tasks)
        if len(self.tasks) == 1:
            sampling = self._sampling_log_probs(draws)
            return [self.tasks[0].sampler.log_probs(draws.logits, draws.tokens, sampling)]
        of_all = self.known(draws)
        assert of_all is not None, "log-probabilities are requested"
        model, sampling = of_all
        log_probs: list[LogProbs | None] = []
        for task, part in zip(self.tasks, self.parts, strict=True):
            if task.sampler.top_log_probs:
                logits = draws.logits[part]
                tokens = draws.tokens[part]
                log_probs.append(task.sampler.log_probs(logits, tokens, sampling[part]))
            elif task.sampler.returns_log_probs:
                log_probs.append(LogProbs(model, sampling, None, part))
            else:
                log_probs.append(None)
        return log_probs

    def _finish(self, draws: Draws, log_probs: Sequence[LogProbs | None]) -> list[Sampled]:
        """Append the tokens of all rows, and record their scores."""
        fulls: list[Sequence[int]] = []
        tokens_of = [Part(draws.tokens, part) for part in self.parts]
        marks = draws.marks
        for task, part, tokens in zip(self.tasks, self.parts, tokens_of, strict=True):
            if task.sampler.records_scores:
                task.sampler.record_scores(task.rows, draws.logits[part], draws.scores[part])
            ended, full = task.sampler.append_drawn(task.rows, tokens)
            fulls.append(full)
            if ended is not None:  # of a call alone
                marks = ended if marks is None else marks + ended
        drawn = DrawnTokens.of(draws.tokens, marks)
        results = []
        for task, tokens, of_task, full in zip(self.tasks, tokens_of, log_probs, fulls, strict=True):
            results.append(Sampled(tokens, of_task, drawn, task.sampler.row_criteria, task.rows, full))
        return results

    def _index(self, flags: Sequence[bool]) -> torch.Tensor:
        """Return the rows of some of the tasks."""
        rows: list[int] = []
        for flag, part in zip(flags, self.parts, strict=True):
            if flag:
                rows += range(part.start, part.stop)
        return to_device(rows, self.device)


def _draw_tokens(probs: torch.Tensor, rngs: Sequence[RowRNG]) -> torch.Tensor:
    """Draw one token of each row with its RNG; without RNGs, with PyTorch's global generator."""
    return draw(probs, rngs) if rngs else multinomial(probs)
