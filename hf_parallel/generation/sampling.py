"""From logits to tokens: `generate`'s own processors, criteria and streamers over rows of unequal length."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.rng import draw, make_rngs
from hf_parallel.kernels import ToHost, to_device

_KNOWS_ROWS = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)
"""Processors of Transformers that know the rows of the batch by their numbers."""
_KEEPS_STATE = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
"""And those that remember what they were asked before."""


class TokenTable:
    """What each row has so far, as `generate` would show it to processors: `[rows, length]`, left-padded."""

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int, room: int) -> None:
        rows, length = input_ids.shape
        self.pad_token_id = pad_token_id
        self.ids = input_ids.new_full((rows, length + max(room, 1)), pad_token_id)
        self.ids[:, :length] = input_ids
        self.lengths = [length] * rows
        self._indexed: tuple[list[int], torch.Tensor] | None = None

    def index(self, rows: Sequence[int]) -> torch.Tensor:
        """Row numbers on the table's device; those asked for last are kept there, so that no step waits for a copy."""
        if self._indexed is None or self._indexed[0] != list(rows):
            self._indexed = list(rows), to_device(rows, self.ids.device)
        return self._indexed[1]

    def append(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Add one token `int64 [len(rows)]` to each of `rows`."""
        self._make_room(max(self.lengths[row] for row in rows) + 1)
        lengths = [self.lengths[row] for row in rows]
        if lengths.count(lengths[0]) == len(lengths):
            column = self.ids[:, lengths[0]]
            column[slice(None) if len(rows) == len(self.lengths) else self.index(rows)] = tokens
        else:
            self.ids[self.index(rows), to_device(lengths, self.ids.device)] = tokens
        for row in rows:
            self.lengths[row] += 1

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens that were not sampled, such as a header, to one row."""
        length = self.lengths[row]
        self._make_room(length + len(tokens))
        self.ids[row, length : length + len(tokens)] = to_device(tokens, self.ids.device)
        self.lengths[row] += len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Take back the tokens of a row from `length` on, padding counted."""
        self.ids[row, length:] = self.pad_token_id
        self.lengths[row] = length

    def fork(self, row: int, count: int) -> list[int]:
        """Add rows that hold what `row` holds; returns their numbers."""
        first = len(self.lengths)
        self.ids = torch.cat((self.ids, self.ids[row].expand(count, -1)))
        self.lengths += [self.lengths[row]] * count
        return list(range(first, first + count))

    def left_padded(self, rows: Sequence[int]) -> torch.Tensor:
        """The rows as one matrix `int64 [len(rows), longest]`."""
        lengths = [self.lengths[row] for row in rows]
        longest = max(lengths)
        everything = len(rows) == len(self.lengths)
        ids = self.ids if everything else self.ids[self.index(rows)]
        if min(lengths) == longest:
            return ids[:, :longest]
        shift = longest - torch.tensor(lengths, device=ids.device)[:, None]
        place = torch.arange(longest, device=ids.device) - shift
        return ids.gather(1, place.clamp(min=0)).masked_fill(place < 0, self.pad_token_id)

    def padded(self, count: int | None = None) -> torch.Tensor:
        """The first `count` rows (default: all), right-padded to the longest: what is returned to the caller."""
        return self.ids[:count, : max(self.lengths[:count])].clone()

    def _make_room(self, length: int) -> None:
        if length > self.ids.shape[1]:
            more = self.ids.new_full((self.ids.shape[0], max(length, 2 * self.ids.shape[1])), self.pad_token_id)
            more[:, : self.ids.shape[1]] = self.ids
            self.ids = more


class _PenaltyOfRows(LogitsProcessor):
    """Repetition penalty that knows each row's padding, asked for some of the rows."""

    def __init__(self, processor: RepetitionPenaltyLogitsProcessor, padding: list[int], sampler: Sampler) -> None:
        self.processor, self.padding, self.sampler = copy.copy(processor), padding, sampler
        self._shown: list[int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, lengths = self.sampler.rows, self.sampler.table.lengths
        rows = rows if len(rows) == len(scores) else range(len(scores))
        padding = [self.padding[row] + max(0, input_ids.shape[1] - lengths[row]) for row in rows]
        if padding != self._shown:
            self._shown, self.processor.prompt_ignore_length = padding, torch.tensor(padding, device=scores.device)
        return self.processor(input_ids, scores)


class MinLengthProcessor(LogitsProcessor):
    """No end of a text before a row has `min_length` tokens, its prompt counted.

    What `MinLengthLogitsProcessor` and `MinNewTokensLengthLogitsProcessor` do; these look for the ends among all tokens
    of the vocabulary at every step, which takes longer than a replayed token otherwise does.
    """

    keeps_rows = False

    @classmethod
    def replacing(cls, processor: LogitsProcessor) -> LogitsProcessor:
        """What does the same as a processor of Transformers that this is for; others as they are."""
        if type(processor) is MinLengthLogitsProcessor:
            return cls(processor.min_length, processor.eos_token_id)
        if type(processor) is MinNewTokensLengthLogitsProcessor:
            return cls(processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id)
        return processor

    def __init__(self, min_length: int, eos_token_id: torch.Tensor) -> None:
        self.min_length, self.eos_token_ids = min_length, eos_token_id.flatten().tolist()
        self._ends: tuple[int, torch.Tensor] | None = None  # of a vocabulary of this size

    @property
    def settings(self) -> dict[str, Any]:
        """What it does, for who compares processors."""
        return {"min_length": self.min_length, "eos_token_ids": self.eos_token_ids}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[-1] >= self.min_length:
            return scores
        vocabulary = scores.shape[-1]
        known = self._ends
        if known is None or known[0] != vocabulary:
            ends = [token for token in self.eos_token_ids if 0 <= token < vocabulary]
            # Prefetch asks from another stream, so the copy must have arrived.
            known = self._ends = vocabulary, torch.tensor(ends, dtype=torch.int64, device=scores.device)
        return scores.index_fill(-1, known[1], -torch.inf)


class Sampler:
    """Chooses the next token of each active row, and says which rows have ended.

    Processors and criteria that come with transformers see the active rows only, so that rows which have ended cost
    nothing. Others may keep state per row of the batch, so they see the whole batch at every step, as under `generate`,
    unless they say `keeps_rows = False`. Where rows are of unequal length, criteria are asked about each by itself: one
    may look at the length.
    """

    def __init__(
        self, call: GenerationCall, table: TokenTable, criteria: StoppingCriteriaList, seed: Any = None
    ) -> None:
        config = call.generation_config
        self.table = table
        self.processors = [
            self._of_rows(MinLengthProcessor.replacing(processor)) for processor in call.logits_processor
        ]
        for processor in self.processors:
            _check_parameters(processor)
        self.criteria = criteria
        self.do_sample = bool(config.do_sample)
        self._draws: dict[int, int] = {}  # tokens that each row has had from here
        self.rows: Sequence[int] = ()  # those that a token is being chosen for
        self.noise = make_rngs(seed, self.num_rows)
        self.processes_all = any(_may_keep_rows(processor) for processor in self.processors)
        self.judges_all = any(_may_keep_rows(criterion) for criterion in criteria)
        self.in_step = any(_may_keep_state(helper) for helper in (*self.processors, *criteria))
        wanted = config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if wanted and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if wanted and config.output_logits else None

    @property
    def stays_on_device(self) -> bool:
        """Whether tokens are drawn without code that was not written with Transformers, which may look at them."""
        return not (self.processes_all or self.judges_all)

    @property
    def draws_apart(self) -> bool:
        """Whether rows may take several tokens while others take one: nothing hangs on what came between."""
        return not self.in_step and (not self.do_sample or self.has_own_noise or self.num_rows == 1)

    @property
    def has_own_noise(self) -> bool:
        """Whether each row draws with noise that no other draws with."""
        return self.noise is not None and all(noise.is_own for noise in self.noise)

    @property
    def num_rows(self) -> int:
        """Rows that the table has by now."""
        return len(self.table.lengths)

    def fork(self, row: int, count: int) -> list[int]:
        """Add rows that go on from where `row` is, with its source of randomness; returns their numbers."""
        if self.noise is not None:
            self.noise += self.noise[row].fork(count)
        new = self.table.fork(row, count)
        for processor in self.processors:
            if isinstance(processor, _PenaltyOfRows):
                processor.padding += [processor.padding[row]] * count
        self._draws |= dict.fromkeys(new, self._draws.get(row, 0))
        return new

    def begin_row(self, length: int, draws: int) -> int:
        """Add a row that holds the first `length` tokens of the last one, after `draws` draws of others.

        Its randomness is its own. Returns its number.
        """
        (row,) = self.fork(self.num_rows - 1, 1)
        self.table.truncate(row, length)
        self._draws[row] = draws
        return row

    def choose(self, rows: Sequence[int], logits: torch.Tensor) -> tuple[list[int], list[bool]]:
        """Sample one token for each of `rows` and append it to the table.

        Parameters
        ----------
        rows : sequence of int
            Active rows, ascending.
        logits : [len(rows), vocabulary]

        Returns
        -------
        (tokens, ended) : list of int, list of bool
        """
        return self.read(self.fetch(*self.draw(rows, logits)))

    def draw(self, rows: Sequence[int], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `choose`, but the tokens `int64 [len(rows)]` and whether they ended their rows stay on the device."""
        return self.draw_from(rows, self.weigh(rows, logits))

    def weigh(self, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """What the next tokens of `rows` are drawn from.

        Parameters
        ----------
        rows : sequence of int
            Active rows, ascending.
        logits : [len(rows), vocabulary]

        Returns
        -------
        float32 [len(rows), vocabulary]
            Probabilities, or scores where the best token is taken.
        """
        self.rows = rows
        scores = self._process(rows, self._copy(logits))
        self._record(self.logits, rows, logits)
        self._record(self.scores, rows, scores)
        return scores.softmax(dim=-1, dtype=torch.float32) if self.do_sample else scores

    def weigh_ahead(self, logits: torch.Tensor, length: int) -> torch.Tensor:
        """What a row of `length` tokens will draw from after `logits`, both `[vocabulary]`.

        For processors that look at no tokens. Changes nothing here, so that another thread may ask.
        """
        ids = self.table.ids.new_zeros(1, 1).expand(1, length)
        return self._processed(ids, self._copy(logits[None]))[0].softmax(dim=-1, dtype=torch.float32)

    def draw_from(self, rows: Sequence[int], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `draw`, from what `weigh` gave."""
        tokens = self._draw(rows, weights)
        self.table.append(rows, tokens)
        self._count(rows)
        return tokens, self._ended(rows)

    @staticmethod
    def fetch(tokens: torch.Tensor, ended: torch.Tensor) -> ToHost:
        """Begin to fetch what was drawn; what the device is given afterwards is not waited for by `read`."""
        return ToHost(torch.stack((tokens, ended.to(tokens.dtype))))

    @staticmethod
    def read(fetched: ToHost) -> tuple[list[int], list[bool]]:
        """What was drawn: the one place at which a decode step waits for the device."""
        numbers, flags = fetched.tolist()
        return numbers, [flag != 0 for flag in flags]

    def accept(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Append tokens that need not be drawn to `rows`.

        Returns
        -------
        list of bool
            Whether a row has ended.
        """
        self.append(rows, tokens)
        return self._ended(rows).tolist()

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Append tokens to `rows`, one to each, whose noise goes on as if they had been drawn."""
        if self.noise is not None and self.do_sample:
            for row in rows:
                self.noise[row].skip()
        self.table.append(rows, torch.tensor(tokens, device=self.table.ids.device))
        self._count(rows)

    def _of_rows(self, processor: Any) -> Any:
        """A processor that may be asked for some of the rows."""
        padding = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is not RepetitionPenaltyLogitsProcessor or not isinstance(padding, torch.Tensor):
            return processor
        times = self.num_rows // len(padding)  # workers have the prompt of their problem
        return _PenaltyOfRows(processor, padding.repeat_interleave(times).tolist(), self)

    def _copy(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as processors get them from `generate`; these may change them."""
        return logits.to(copy=True, dtype=torch.float32, device=self.table.ids.device)

    def _process(self, rows: Sequence[int], raw: torch.Tensor) -> torch.Tensor:
        if not self.processors:
            return raw
        if not self.processes_all:
            lengths = [self.table.lengths[row] for row in rows]
            if lengths.count(lengths[0]) == len(lengths):
                return self._processed(self.table.left_padded(rows), raw)
            out = torch.empty_like(raw)
            for length in set(lengths):  # a processor may look at the length, or at every token
                of = [i for i, other in enumerate(lengths) if other == length]
                self.rows = [rows[i] for i in of]
                out[of] = self._processed(self.table.left_padded(self.rows), raw[of]).to(out.dtype)
            self.rows = rows
            return out
        if len(rows) == self.num_rows:
            return self._processed(self.table.left_padded(rows), raw)
        index = self.table.index(rows)
        everything = raw.new_zeros(self.num_rows, raw.shape[-1])
        everything[index] = raw
        return self._processed(self._whole_batch(rows), everything)[index]

    def _whole_batch(self, rows: Sequence[int]) -> torch.Tensor:
        """All rows of the batch; those that have ended are padded on the right, unless they are the longer ones."""
        longest = max(self.table.lengths)
        if all(self.table.lengths[row] == longest for row in rows):
            return self.table.ids[:, :longest]
        return self.table.left_padded(range(self.num_rows))

    def _processed(self, ids: Any, scores: Any) -> torch.Tensor:
        processed = scores
        for processor in self.processors:  # a `LogitsProcessorList` looks into the signature of each, at every step
            processed = processor(ids, processed)
        if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
            got = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
            raise ValueError(f"a logits_processor must return scores of the shape {list(scores.shape)}, got {got}")
        return processed

    def _draw(self, rows: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
        if not self.do_sample:
            return weights.argmax(dim=-1)
        if self.noise is None:
            return torch.multinomial(weights, num_samples=1).squeeze(1)
        return draw(weights, [self.noise[row] for row in rows])

    def _ended(self, rows: Sequence[int]) -> torch.Tensor:
        scores = None if self.scores is None else tuple(self.scores)  # what `generate` gives to criteria
        if len({self.table.lengths[row] for row in rows}) == 1:
            if not self.judges_all:
                return self._judged(self.table.left_padded(rows), scores)
            return self._judged(self._whole_batch(rows), scores)[self.table.index(rows)]
        # A criterion may look at the length: rows of unequal length are asked apart.
        groups: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(i if self.judges_all else self.table.lengths[row], []).append(i)
        ended = torch.empty(len(rows), dtype=torch.bool, device=self.table.ids.device)
        for of in groups.values():
            ended[of] = self._judged(self.table.left_padded([rows[i] for i in of]), scores)
        return ended

    def _judged(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """Ask every criterion about the rows `ids`; returns `bool [len(ids)]`."""
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            said: Any = criterion(ids, scores)
            if isinstance(said, bool):
                said = torch.full_like(ended, said)
            if not isinstance(said, torch.Tensor) or said.shape not in ((), ended.shape):
                got = list(said.shape) if isinstance(said, torch.Tensor) else type(said).__name__
                raise ValueError(f"stopping_criteria must return one bool per row ({len(ids)}), got {got}")
            ended = ended | said.bool()
        return ended

    def _record(self, into: list[torch.Tensor] | None, rows: Sequence[int], what: torch.Tensor) -> None:
        """Keep scores `[rows, vocabulary]` at the places of the rows' next draws; rows without one hold zeros."""
        if into is None:
            return
        draws, what = [self._draws.get(row, 0) for row in rows], what.to(self.table.ids.device)
        for place in sorted(set(draws)):
            while len(into) <= place:
                into.append(what.new_zeros((self.num_rows, what.shape[-1]), dtype=torch.float32))
            if missing := self.num_rows - len(into[place]):
                into[place] = torch.cat((into[place], into[place].new_zeros(missing, what.shape[-1])))
            of = [i for i, other in enumerate(draws) if other == place]
            if len(of) == len(rows):
                into[place][self.table.index(rows)] = what.float()
            else:
                into[place][[rows[i] for i in of]] = what[of].float()

    def _count(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._draws[row] = self._draws.get(row, 0) + 1


def _check_parameters(processor: Any) -> None:
    """Refuse a processor that asks for more than `generate` gives it."""
    more = list(inspect.signature(processor.__call__).parameters)[2:]
    if more:
        name = type(processor).__name__
        raise ValueError(f"a logits_processor is given input_ids and scores, but {name} asks for {more}, too")


def _may_keep_rows(helper: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or a criterion may know rows by their numbers in the batch."""
    return _may_keep_state(helper) or type(helper).__name__ in _KNOWS_ROWS


def _may_keep_state(helper: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or a criterion may remember what it was asked before, for each row of the batch.

    One of the caller's own that keeps nothing may say so: `keeps_rows = False`.
    """
    kind = type(helper)
    if not getattr(helper, "keeps_rows", not isinstance(helper, _PenaltyOfRows)):
        return False
    return not kind.__module__.startswith("transformers.generation") or kind.__name__ in _KEEPS_STATE
