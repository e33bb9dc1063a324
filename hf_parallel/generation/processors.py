"""Logits processors of the decode loop, and which processors and criteria depend on the rows of the batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
)

from hf_parallel.generation.token_table import TokenTable
from hf_parallel.kernels import to_device

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
        self.min_length, self.eos_token_ids = min_length, eos_token_id.flatten().tolist()
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
        indices = self._indices
        if indices is None or indices[0] != vocabulary:
            tokens = [token for token in self.eos_token_ids if 0 <= token < vocabulary]
            # A blocking copy, as prefetch calls the processor on another CUDA stream.
            indices = self._indices = vocabulary, torch.tensor(tokens, dtype=torch.int64, device=scores.device)
        return indices[1]


class RowPenalty(LogitsProcessor):
    """Repetition penalty on the tokens of a row in `table`, from index `ignored[row]` on."""

    keeps_rows = False

    def __init__(self, processor: RepetitionPenaltyLogitsProcessor, table: TokenTable) -> None:
        self.penalty, self.table, count = processor.penalty, table, len(table.lengths)
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):  # one number per prompt
            self.ignored = ignored.cpu()[torch.arange(count) * len(ignored) // count].tolist()
        else:
            self.ignored = [ignored or 0] * count

    def tokens(self, rows: Sequence[int], filler: int) -> torch.Tensor:
        """Return the tokens of rows, `int64 [len(rows), longest]`, with `filler` in the place of others."""
        ids, lengths = self.table.left_padded(rows), self.table.lengths
        begins = [self.ignored[row] + ids.shape[1] - lengths[row] for row in rows]
        if any(begins):
            columns = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(columns < to_device(begins, ids.device)[:, None], filler)
        return ids


class PerPromptProcessor(LogitsProcessor):
    """Calls a stateless processor that expects one row per prompt on several rows per prompt, ordered by prompt."""

    def __init__(self, processor: LogitsProcessor, num_prompts: int) -> None:
        self.processor, self.num_prompts = processor, num_prompts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        processed, rows_per_prompt = torch.empty_like(scores), len(scores) // self.num_prompts
        for first in range(rows_per_prompt):
            rows = slice(first, None, rows_per_prompt)  # one row of each prompt
            processed[rows] = self.processor(input_ids[rows], scores[rows])
        return processed


def check_signature(processor: LogitsProcessor) -> None:
    """Raise a `ValueError` for a processor with more arguments than `generate` passes."""
    more = list(inspect.signature(processor.__call__).parameters)[2:]
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
