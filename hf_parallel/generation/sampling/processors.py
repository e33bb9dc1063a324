"""Logits processors of the decode loop, and which processors and criteria depend on the rows of the batch.

The functions of `STAGES` process rows of several calls at once, and return the same bits as the processors of
Transformers. (Of equal scores at the boundary of top-p, the C kernel removes the first; there, Transformers' sort may
remove any.) `split_warpers` finds the warpers that `hf_parallel.kernels.sampling` applies together with the draw.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional as F
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.generation.validation import check_int
from hf_parallel.kernels import native, to_device
from hf_parallel.kernels.sampling import Warpers, settings_of
from hf_parallel.models.probing.signature import parameters_of

_BATCH_DEPENDENT = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)
"""Processors of Transformers that index the rows of the batch."""
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


class MinLengthProcessor(LogitsProcessor):
    """Suppresses tokens until a row has `min_length` tokens, prompt included.

    Replaces `MinLengthLogitsProcessor`, `MinNewTokensLengthLogitsProcessor` and, without end,
    `SuppressTokensLogitsProcessor`, which search the whole vocabulary at every step.
    """

    keeps_rows = False

    @classmethod
    def convert(cls, processor: LogitsProcessor) -> LogitsProcessor:
        """Return the equivalent of one of the three processors of Transformers; return any other unchanged."""
        if type(processor) is MinLengthLogitsProcessor:
            return cls(processor.min_length, processor.eos_token_id)
        if type(processor) is MinNewTokensLengthLogitsProcessor:
            return cls(processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id)
        if type(processor) is SuppressTokensLogitsProcessor:
            return cls(sys.maxsize, processor.suppress_tokens)
        return processor

    def __init__(self, min_length: int, eos_token_id: torch.Tensor) -> None:
        self.min_length = min_length
        self.eos_token_ids = eos_token_id.flatten().tolist()
        self._indices: tuple[int, torch.Tensor] | None = None  # vocabulary size, tokens on the device

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by name, to compare processors."""
        return {"min_length": self.min_length, "eos_token_ids": self.eos_token_ids}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[-1] >= self.min_length:
            return scores
        return scores.index_fill(-1, self.indices(scores), -torch.inf)

    def indices(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the tokens that are in the vocabulary of `scores`, int64 `[n]` on the device."""
        vocabulary = scores.shape[-1]
        if self._indices is None or self._indices[0] != vocabulary:
            tokens = [token for token in self.eos_token_ids if 0 <= token < vocabulary]
            # A blocking copy, as prefetch calls the processor on another CUDA stream.
            indices = torch.tensor(tokens, dtype=torch.int64, device=scores.device)
            self._indices = (vocabulary, indices)
            return indices
        return self._indices[1]


class RowPenalty(LogitsProcessor):
    """Repetition penalty on the tokens of a row in `table`, from index `ignored[row]` on."""

    keeps_rows = False

    def __init__(self, processor: RepetitionPenaltyLogitsProcessor, table: TokenTable) -> None:
        self.penalty = processor.penalty
        self.table = table
        count = len(table.lengths)
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):  # one number per prompt
            prompt_of_row = torch.arange(count) * len(ignored) // count
            self.ignored = ignored.cpu()[prompt_of_row].tolist()
        else:
            self.ignored = [ignored or 0] * count

    def tokens(self, rows: Sequence[int], filler: int) -> torch.Tensor:
        """Return the tokens of rows, `int64 [len(rows), longest]`, with `filler` in the place of others."""
        ids = self.table.left_padded(rows)
        lengths = self.table.lengths
        begins = [self.ignored[row] + ids.shape[1] - lengths[row] for row in rows]
        if any(begins):
            columns = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(columns < to_device(begins, ids.device)[:, None], filler)
        return ids


class OccurrencePenalty(LogitsProcessor):
    """Frequency and presence penalty of OpenAI's API, on the tokens that a row has generated.

    Subtracts `frequency * count + presence * (count > 0)` from the logit of a token that the row has generated `count`
    times. Negative penalties encourage repetition.

    Parameters
    ----------
    prompt_length : int
        Number of tokens of the prompt with its padding, which are not counted.
    frequency, presence : float

    Examples
    --------
    >>> penalty = OccurrencePenalty(ids.shape[1], frequency=0.5)
    >>> model.generate(ids, generation_mode="shared_prefix", logits_processor=[penalty])
    """

    keeps_rows = False

    def __init__(self, prompt_length: int, frequency: float = 0.0, presence: float = 0.0) -> None:
        check_int("prompt_length", prompt_length, at_least=0)
        for name, value in (("frequency", frequency), ("presence", presence)):
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        self.prompt_length = prompt_length
        self.frequency = frequency
        self.presence = presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return _subtract(scores, input_ids[:, self.prompt_length :], self.frequency, self.presence)


class RowOccurrence(RowPenalty):
    """`OccurrencePenalty` on the tokens of a row in `table`."""

    def __init__(self, processor: OccurrencePenalty, table: TokenTable) -> None:
        self.frequency = processor.frequency
        self.presence = processor.presence
        self.table = table
        self.ignored = [processor.prompt_length] * len(table.lengths)


class ThinkingBudget(LogitsProcessor):
    """Ends the reasoning of a row that has `budget` tokens of it, however often it begins and ends.

    `begin` are the tokens that open reasoning, `end` is the one that closes it. `known` is how often the prompt holds
    `begin` without opening the reply's reasoning.
    """

    keeps_rows = False

    def __init__(self, budget: int, begin: Sequence[int], end: int, known: int) -> None:
        self.budget = budget
        self.begin = list(begin)
        self.end = end
        self.known = known

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        opens = self.opens(input_ids)
        is_new = opens.cumsum(1) > self.known
        last_opened = ((opens & is_new) * position).cummax(1).values  # up to each token
        last_closed = ((input_ids == self.end) * position).cummax(1).values
        thinks = last_opened > last_closed
        spent = (thinks[:, 1:] & thinks[:, :-1]).sum(1)  # without the marks that open reasoning
        is_over = thinks[:, -1] & (spent >= self.budget)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.end] = 0
        return torch.where(is_over[:, None], forced, scores)

    def opens(self, ids: torch.Tensor) -> torch.Tensor:
        """Return where the tokens that open reasoning end, bool `[rows, length]`."""
        begin = torch.tensor(self.begin, device=ids.device)
        padded = F.pad(ids, (len(begin) - 1, 0), value=-1)
        windows = padded.unfold(1, len(begin), 1)
        return (windows == begin).all(-1)


class PerPromptProcessor(LogitsProcessor):
    """Calls a stateless processor that expects one row per prompt on several rows per prompt, ordered by prompt."""

    def __init__(self, processor: LogitsProcessor, num_prompts: int) -> None:
        self.processor = processor
        self.num_prompts = num_prompts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        processed = torch.empty_like(scores)
        rows_per_prompt = len(scores) // self.num_prompts
        for first in range(rows_per_prompt):
            rows = slice(first, None, rows_per_prompt)  # one row of each prompt
            processed[rows] = self.processor(input_ids[rows], scores[rows])
        return processed


def check_signature(processor: LogitsProcessor) -> None:
    """Raise a `ValueError` for a processor with more arguments than `generate` passes."""
    call = processor.__call__
    parameters = parameters_of(call) if inspect.ismethod(call) else inspect.signature(call).parameters
    more = list(parameters)[2:]
    if more:
        name = type(processor).__name__
        raise ValueError(f"a logits_processor receives input_ids and scores, but {name} also expects {more}")


def needs_batch(helper: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or criterion may depend on the indices of the rows in the batch."""
    return is_stateful(helper) or type(helper).__name__ in _BATCH_DEPENDENT


def is_stateful(helper: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or criterion may keep state per row between calls.

    Known for classes of Transformers. Any other is assumed to keep state unless its attribute `keeps_rows` is False.
    """
    kind = type(helper)
    if not getattr(helper, "keeps_rows", True):
        return False
    return not kind.__module__.startswith("transformers.generation") or kind.__name__ in _STATEFUL


class ProcessorBatch(NamedTuple):
    """Processors of one class, one for each of n rows, with the rows' numbers in their tables and their lengths."""

    processors: list[Any]
    rows: list[int]
    lengths: list[int]


RowWise: TypeAlias = Callable[[torch.Tensor, ProcessorBatch], torch.Tensor]
"""(scores float32 `[n, vocabulary]`, batch) -> processed scores.

It does not write to its input, which it may return if nothing changes.
"""


def penalize(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Apply repetition penalties."""
    tokens = _penalized_tokens(batch, scores.shape[1])
    padded = F.pad(scores, (0, 1))  # for tokens that are ignored, or outside the output vocabulary
    of_tokens = padded.gather(1, tokens)
    penalty = _setting([processor.penalty for processor in batch.processors], scores.device)
    of_tokens = torch.where(of_tokens < 0, of_tokens * penalty, _divide(of_tokens, penalty))
    return padded.scatter_(1, tokens, of_tokens)[:, :-1]


def subtract_occurrences(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Apply occurrence penalties."""
    frequency = _setting([processor.frequency for processor in batch.processors], scores.device)
    presence = _setting([processor.presence for processor in batch.processors], scores.device)
    tokens = _penalized_tokens(batch, scores.shape[1])
    return _subtract(scores, tokens, frequency, presence)


def suppress(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Suppress the end tokens of rows that are too short."""
    first = batch.processors[0]
    if batch.processors.count(first) == len(batch.processors) and max(batch.lengths) < first.min_length:
        return scores.index_fill(1, first.indices(scores), -torch.inf)
    rows: list[int] = []
    tokens: list[int] = []
    for row, (processor, length) in enumerate(zip(batch.processors, batch.lengths, strict=True)):
        if length < processor.min_length:
            of_row = [token for token in processor.eos_token_ids if 0 <= token < scores.shape[1]]
            rows += [row] * len(of_row)
            tokens += of_row
    if rows:
        scores = scores.clone()
        row_index = to_device(rows, scores.device)
        token_index = to_device(tokens, scores.device)
        scores[row_index, token_index] = -torch.inf
    return scores


def scale(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Divide by the temperature."""
    temperature = _setting([processor.temperature for processor in batch.processors], scores.device)
    return _divide(scores, temperature)


def keep_top_k(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Keep the `top_k` highest scores, and ties with the lowest of them."""
    counts = [min(processor.top_k, scores.shape[1]) for processor in batch.processors]
    filtered = native.keep_top_k(scores, counts)
    if filtered is not None:
        return filtered
    highest = torch.topk(scores, max(counts))[0]
    if min(counts) == max(counts):
        last = highest[:, -1:]
    else:
        last = highest.gather(1, to_device(counts, scores.device)[:, None] - 1)
    return scores.masked_fill(scores < last, -torch.inf)


def keep_top_p(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Keep the most probable tokens of total probability `top_p`."""
    if native.can_filter(scores):
        warpers = [Warpers(top_p=processor.top_p) for processor in batch.processors]
        return native.keep_probable(scores, settings_of(warpers, scores.shape[1], scores.device, is_inverted=False))
    ascending, order = torch.sort(scores, descending=False)
    removable = _setting([1 - processor.top_p for processor in batch.processors], scores.device)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= removable
    removed[..., -1:] = False
    removed = removed.scatter(1, order, removed)  # in the order of the vocabulary
    return scores.masked_fill(removed, -torch.inf)


def keep_min_p(scores: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Keep tokens of at least `min_p` times the highest probability."""
    if native.can_filter(scores):
        warpers = [Warpers(min_p=processor.min_p) for processor in batch.processors]
        return native.keep_probable(scores, settings_of(warpers, scores.shape[1], scores.device, is_inverted=False))
    probs = scores.softmax(dim=-1)
    min_p = _setting([processor.min_p for processor in batch.processors], scores.device)
    limit = min_p * probs.amax(dim=-1, keepdim=True)
    best = torch.topk(probs, 1, dim=-1).indices
    removed = (probs < limit).scatter_(-1, best, False)
    return scores.masked_fill(removed, -torch.inf)


STAGES: dict[type, tuple[int, RowWise]] = {
    RowPenalty: (0, penalize),
    MinLengthProcessor: (1, suppress),
    RowOccurrence: (2, subtract_occurrences),
    TemperatureLogitsWarper: (3, scale),
    TopKLogitsWarper: (4, keep_top_k),
    TopPLogitsWarper: (5, keep_top_p),
    MinPLogitsWarper: (6, keep_min_p),
}
"""Number and function of each class, in the order in which `generate` applies them."""
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def stage_of(processor: LogitsProcessor) -> tuple[int, RowWise] | None:
    """Return number and function of a row-wise processor; None for any other."""
    is_plain = getattr(processor, "min_tokens_to_keep", 1) == 1
    is_plain = is_plain and getattr(processor, "filter_value", -torch.inf) == -torch.inf
    return STAGES.get(type(processor)) if is_plain else None


def split_warpers(processors: Sequence[LogitsProcessor]) -> tuple[list[LogitsProcessor], Warpers]:
    """Return the processors before the last warpers, and the settings of these."""
    settings: dict[str, float] = {}
    head = list(processors)
    following = len(STAGES)  # number of the stage after the next warper
    while head and type(head[-1]) in _WARPERS:
        stage = stage_of(head[-1])
        if stage is None or stage[0] >= following:
            break
        following, _ = stage
        warper = head.pop()
        name = _WARPERS[type(warper)]
        settings[name] = getattr(warper, name)
    return head, Warpers(**settings)  # type: ignore[arg-type]  # `top_k` is an int


def _penalized_tokens(batch: ProcessorBatch, filler: int) -> torch.Tensor:
    """Return the tokens of each row that its penalty applies to, int64 `[n, longest]`, padded with `filler`."""
    rows_of: dict[RowPenalty, list[int]] = {}
    for processor, row in zip(batch.processors, batch.rows, strict=True):
        rows_of.setdefault(processor, []).append(row)
    longest = max(batch.lengths)
    tokens = []
    for processor, rows in rows_of.items():
        ids = processor.tokens(rows, filler)
        tokens.append(F.pad(ids, (longest - ids.shape[1], 0), value=filler))
    return torch.cat(tokens).clamp(max=filler)


def _subtract(
    scores: torch.Tensor, tokens: torch.Tensor, frequency: float | torch.Tensor, presence: float | torch.Tensor
) -> torch.Tensor:
    """Apply occurrence penalties for tokens int64 `[n, length]`."""
    vocabulary = scores.shape[1]
    counts = scores.new_zeros(len(scores), vocabulary + 1)  # the last for fillers and what is no output token
    ones = torch.ones_like(tokens, dtype=scores.dtype)
    counts = counts.scatter_add_(1, tokens.clamp(max=vocabulary), ones)[:, :-1]
    penalty = frequency * counts + presence * (counts > 0)
    return scores - penalty


def _setting(values: list[float], device: torch.device) -> float | torch.Tensor:
    """Return the setting if all rows share it, else a column with one setting per row."""
    if values.count(values[0]) == len(values):
        return values[0]
    return to_device(values, device, torch.float32)[:, None]


def _divide(scores: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """Divide rows as PyTorch divides by a number: on CUDA it multiplies by the inverse."""
    if isinstance(divisor, torch.Tensor) and scores.device.type != "cpu":
        return scores * divisor.reciprocal()
    return scores / divisor
